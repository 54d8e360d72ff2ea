"""Tables and lines: how cells are aligned, what is never broken, and what no text makes a terminal or a page do."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import lit_compress
from lit_compress.utils.progress import note
from lit_compress.utils.tables import as_code, escaped, print, show

ESCAPES = "\x1b[31m", "\x1b]8;;http://a\x07", "\x9b2J", "a\rb", "\u202eabc", "\u2066a", "\udc80", "\x7f", "\b"


def test_the_first_columns_are_on_the_left_and_stay_whole(capsys):
    show(["name", "net", "ms"], [["a", "b", "1"], ["c " * 40, "d " * 80, "2"]], left=2, whole=1)
    first, second, *more = capsys.readouterr().out.splitlines()[3:-1]
    assert re.fullmatch(r"│ a +│ b +│  1 │", first) and f"│ {'c ' * 40}" in second and second.endswith("│  2 │")
    assert "d d" in more[0] and len(first) == 160


@pytest.mark.parametrize("text", ESCAPES)
def test_a_terminal_obeys_no_text(text, capsys):
    print(f"label '{text}'", json.dumps(f"é{text}", ensure_ascii=False), flush=True)
    note(f"label '{text}' of a note")
    out, err = capsys.readouterr()
    show([text], [[f"{text}[/][link=http://a]"]])
    table = capsys.readouterr().out
    assert json.loads(out.rpartition("' ")[2]) == f"é{text}"  # JSON stays that
    for shown in (out, err, table, escaped(text), as_code(text)):
        assert not any(not sign.isprintable() and sign != "\n" for sign in shown) and len(shown.splitlines()) < 6
    assert "[/][link=http://a]" in table


def test_lines_are_printed_in_one_way():
    """Only what has no text of others, or is read by a program, is printed by Python's own function."""
    package, own = Path(lit_compress.__file__).parent, []
    for path in package.rglob("*.py"):
        if "print(" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        named = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        if "print" in named and "print" not in imported:
            own.append(path.relative_to(package).as_posix())
    assert sorted(own) == ["__main__.py", "utils/progress.py"]


@pytest.mark.parametrize("text", ["<img src=x>", "[a](http://b)", "`a`", "a|b", "# a", "*a* _b_", "a\n\n# b", "\\"])
def test_markdown_shows_a_text(text):
    bare = escaped(text)
    for sign in "\\`*{}[]<>|#":
        assert bare.count(sign) - text.count(sign) in (0, len(bare) - len(" ".join(text.split())))
        assert all(bare[i - 1] == "\\" for i, here in enumerate(bare) if here == sign != "\\")
    assert "\n" not in bare and "`" not in as_code(text) and escaped("LABEL_0 a-b 1.5") == "LABEL_0 a-b 1.5"
