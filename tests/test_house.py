"""The rooms of the package: imports run down only, every room says what it holds, a paper imports no other paper."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lit_compress

PACKAGE = Path(lit_compress.__file__).parent
ROOT = "__init__"  # the package itself: ``from lit_compress import name`` of something that is no module
FILES = ("__init__", "__main__", "version")
# from the top; rooms on one floor do not know each other
FLOORS = (
    (ROOT,), ("__main__", "api"), ("cli",), ("run",), ("export", "methods"), ("stages", "evaluation"),
    ("calibration", "data"), ("models",), ("layers", "tasks"), ("numerics",), ("utils",), ("version",),
)  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or ROOT


def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lit_compress":
            base = str(node.module).removeprefix("lit_compress").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".removeprefix(".")
                here = PACKAGE / name.replace(".", "/")
                found.add(name if here.is_dir() or here.with_suffix(".py").is_file() else base or ROOT)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("lit_compress") for alias in node.names), path
    return found


def test_the_rooms_are_those_of_the_map():
    names = {path.name for path in PACKAGE.iterdir() if path.suffix != ".pyc"} - {"__pycache__", "configs", "py.typed"}
    assert names == {f"{room}.py" if room in FILES else room for room in LEVEL}


def is_up(importing: str, imported: str) -> bool:
    """Say whether a module imports one of its own floor or of a floor above."""
    a, b = importing.split(".")[0], imported.split(".")[0]
    return a != b and LEVEL[a] >= LEVEL[b]


def test_imports_run_down():
    up = [f"{module(path)} -> {name}" for path in files() for name in imports(path) if is_up(module(path), name)]
    assert not up, "\n".join(up)


@pytest.mark.parametrize(
    ("room", "line"),
    [("utils", "from lit_compress import methods"), ("export", "from lit_compress import __version__"),
     ("models", "from lit_compress.methods.base import Method"), ("data", "from lit_compress.models import sites"),
     ("version", "from lit_compress.utils import errors")],
)  # fmt: skip
def test_an_import_upwards_is_seen(room, line, tmp_path):
    (tmp_path / "file.py").write_text(line)
    (name,) = imports(tmp_path / "file.py")
    assert is_up(room, name) == (room != "data"), name


def test_no_circle_between_files():
    graph = {module(path): {name for name in imports(path) if name != module(path)} for path in files()}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_paper_imports_no_other_paper():
    papers = {module(path) for path in files() if module(path).startswith("methods.")} - {"methods.base"}
    for path in files():
        own = module(path).split(".")[:2]
        if module(path) in papers:
            others = {name for name in imports(path) & papers if name.split(".")[:2] != own}
            assert not others, (path, others)


def test_every_room_says_what_it_holds():
    for path in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.parent not in (PACKAGE, PACKAGE / "methods" / "cofi"):
            assert "Begin with" in text and text.count(".") >= 3, path
