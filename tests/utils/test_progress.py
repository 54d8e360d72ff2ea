"""A phase has a bar on the first rank; in a file one that takes some seconds has a line in a minute."""

from __future__ import annotations

import sys

import pytest

from lit_compress.utils.progress import track


@pytest.mark.parametrize("where", ["terminal", "file", "another rank"])
def test_a_short_phase_shows_in_a_terminal_alone(where, capsys, monkeypatch):
    if where == "another rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: where != "file")
    assert list(track(iter("abc"), "decompose", 3)) == list("abc")
    assert ("decompose:" in capsys.readouterr().err) == (where == "terminal")
