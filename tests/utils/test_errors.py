"""An error of a user is one line that can be read."""

from __future__ import annotations

from lit_compress.utils.errors import LONGEST, UserError


def test_a_very_long_value_is_cut_in_its_middle():
    line = str(UserError(f"model.density: '{'a' * 5000}'\n is not a number; nearest valid value 0.5"))
    assert len(line) == LONGEST and line.startswith("model.density: 'aaa") and line.endswith("nearest valid value 0.5")


def test_others_stay_without_what_a_terminal_obeys():
    assert str(UserError("data.path:  no\n folder 'x'")) == "data.path: no folder 'x'"
    assert str(UserError("data.path: '\x1b[2J\u202e'")) == r"data.path: '\u001b[2J\u202e'"
