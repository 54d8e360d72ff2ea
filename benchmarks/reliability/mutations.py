"""How many broken places do the tests notice?

    python -m pytest -n 2 --cov=lit_compress --cov-context=test     # once: which test runs which line, into .coverage
    python -m benchmarks.reliability.mutations [--places 100] [--seed 0] [--only TEXT] [--minutes 60] [--list]

Chooses places of ROOMS by the seed alone, as many of each room as its share of the lines. A place is a comparison, an
operator, a condition or a number of a function, and is broken in a copy of the tree. Then the tests run that mirror the
file, and after them all others that run the line, those of the room first. The first test that fails has noticed it.
Writes benchmarks/reliability/results/mutations/all.json, and continues where it was: a place that was tried before is
not tried again unless its line has changed. Places that change nothing that can be seen (a bound of a search, a text)
are in EQUAL with the reason; the next place of the room is tried instead.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import pytest
from coverage import CoverageData

from benchmarks import common

SCRIPT = "reliability/mutations"
ROOT = common.HERE.parent
ROOMS = ("numerics", "stages", "export", "run", "data")
SECONDS = 120  # of a test; one that never ends has noticed it
MOST = 300  # tests of a place, besides those that mirror its file
EQUAL = {  # "file: line as it is -> line as it was made": why nobody can see it
    "lit_compress/numerics/losses.py: rows = state.new_tensor(float(state[..., 0].numel())) if mask is None else "
    "(mask != 0).sum() -> rows = state.new_tensor(float(state[..., 1].numel())) if mask is None else (mask != 0).sum()":
        "both have the same number",
    "lit_compress/export/runtimes.py: options.intra_op_num_threads, options.inter_op_num_threads, "
    "options.log_severity_level = setting.threads, 1, 3 -> options.intra_op_num_threads, "
    "options.inter_op_num_threads, options.log_severity_level = setting.threads, 1, 4": "which messages are shown",
    'lit_compress/export/folder.py: for _ in track([0], "check the export in another process"): -> for _ in track([1], '
    '"check the export in another process"):': "one turn",
}  # fmt: skip
SWAPPED: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One way to break a file: the text from ``start`` to ``end`` becomes ``new``."""

    path: Path
    start: int
    end: int
    new: str

    def broken(self) -> str:
        """Return the file's text with the place broken."""
        text = self.path.read_text(encoding="utf-8")
        return text[: self.start] + self.new + text[self.end :]

    @property
    def lines(self) -> range:
        """The lines that are broken, from 1."""
        text = self.path.read_text(encoding="utf-8")
        return range(text.count("\n", 0, self.start) + 1, text.count("\n", 0, self.end) + 2)

    def __str__(self) -> str:
        """Return the file and the line before and after; the name of the place."""
        text = f"{self.path.read_text(encoding='utf-8')}\n"
        begin = text.rfind("\n", 0, self.start) + 1
        old = text[begin : text.index("\n", self.start)]
        new = text[begin : self.start] + self.new + text[self.end : text.index("\n", self.end)]
        return f"{self.path.relative_to(ROOT)}: {old.strip()} -> {new.strip()}"


def places_of(path: Path) -> list[Place]:
    """Return every place of a file, in its order.

    Texts, types, imports and what is outside functions are left alone.
    """
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    if not text.isascii():  # columns count bytes
        return []
    found: list[Place] = []

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def between(left: ast.expr, right: ast.expr, kind: ast.AST) -> None:
        start, end = at(left.end_lineno or 0, left.end_col_offset or 0), at(right.lineno, right.col_offset)
        if (new := SWAPPED.get(type(kind))) and "(" not in text[start:end] and ")" not in text[start:end]:
            found.append(Place(path, start, end, f" {new} "))

    def whole(node: ast.expr, new: str) -> None:
        start = at(node.lineno, node.col_offset)
        found.append(Place(path, start, at(node.end_lineno or 0, node.end_col_offset or 0), new))

    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for statement in function.body for node in ast.walk(statement)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            whole(node, ast.get_source_segment(text, node.operand) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            whole(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            whole(node, str(node.value + 1))
    unique = {(place.start, place.end): place for place in found}
    return [unique[key] for key in sorted(unique)]


def chosen(count: int, seed: int) -> list[Place]:
    """Return ``count`` places, of each room as many as its share of the lines, and none of EQUAL.

    Most are the same after a change of the code: the hash of a place's name decides.
    """
    rooms = {room: sorted((ROOT / "lit_compress" / room).rglob("*.py")) for room in ROOMS}
    lines = {room: sum(len(path.read_text().splitlines()) for path in paths) for room, paths in rooms.items()}
    picked = []
    for room, paths in rooms.items():
        places = {str(place): place for path in paths for place in places_of(path)}
        order = sorted(places.keys() - EQUAL.keys(), key=lambda name: sha256(f"{seed} {name}".encode()).digest())
        picked += [places[name] for name in order[: round(count * lines[room] / sum(lines.values()))]]
    return picked


def mirror(path: Path) -> str:
    """Return the file of tests that mirrors a file, whether it is there or not."""
    inner = path.relative_to(ROOT / "lit_compress")
    return f"tests/{inner.parent}/test_{inner.name}"


def who_runs(place: Place, seen: CoverageData) -> tuple[list[str], list[str]]:
    """Return the tests that run a place's lines: those of its mirror, and at most MOST others, its room's first."""
    inner, room = place.path.relative_to(ROOT), f"tests/{place.path.relative_to(ROOT / 'lit_compress').parts[0]}/"
    file = next((name for name in seen.measured_files() if name.endswith(str(inner))), str(inner))
    found = seen.contexts_by_lineno(file)
    names = {name.partition("|")[0] for line in place.lines for name in found.get(line, ()) if "::" in name}
    own = sorted(name for name in names if name.startswith(mirror(place.path)))
    others = sorted(names - {*own}, key=lambda name: sha256(f"{place}{name}".encode()).digest())
    return own, sorted(others, key=lambda name: not name.startswith(room))[:MOST]


def first_failure(tree: Path, tests: list[str]) -> str | None:
    """Return the test that fails first in a tree, or None if all pass; a fork of this process runs them."""
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = said
            os.chdir(tree)
            sys.path = [str(tree), *(path for path in sys.path if Path(path) != ROOT)]
            os.environ["PYTHONPATH"] = str(tree)
            for name in [name for name in sys.modules if name.split(".")[0] in ("lit_compress", "benchmarks")]:
                del sys.modules[name]
            words = ["-xq", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=no", "-o", f"timeout={SECONDS}"]
            words += ["-o", "timeout_method=thread"]  # which also ends what waits in C
            code = pytest.main([*words, *tests])
            said.flush()
            os._exit(int(code))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        lines = said.read().splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines[-1:] or [f"exit code {code}"])[0] if code else None


def main() -> None:
    """Break places until all are tried or the time is over, and write what was noticed."""
    for library in ("lightning.pytorch", "datasets", "transformers.models.bert.modeling_bert"):
        import_module(library)  # what takes seconds is imported once
    parser = common.parser(SCRIPT, __doc__)
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="in the name of a place")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="of a run with --cov-context=test")
    parser.add_argument("--list", action="store_true", help="print the places, and who noticed them")
    options = parser.parse_args()
    places = {str(place): place for place in chosen(options.places, options.seed) if options.only in str(place)}
    file, until = options.results / "all.json", time.monotonic() + 60 * options.minutes
    known = json.loads(file.read_text()) if file.is_file() else {"noticed": {}, "passed": {}}
    noticed = {name: test for name, test in known["noticed"].items() if name in places}
    passed = {name: count for name, count in known["passed"].items() if name in places and name not in noticed}
    if options.list:
        print(*(f"{name} -> {noticed.get(name, f'passed {passed.get(name, 0)} tests')}" for name in places), sep="\n")
        return
    seen = CoverageData(str(options.coverage))
    seen.read()
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work) / "tree"  # one for all places: what is compiled is kept
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "site", "__pycache__"))
        for name, place in places.items():
            if name in noticed or name in passed or time.monotonic() > until:
                continue
            broken, (own, others) = tree / place.path.relative_to(ROOT), who_runs(place, seen)
            broken.write_text(place.broken(), encoding="utf-8")
            test = (own and first_failure(tree, own)) or (others and first_failure(tree, others))
            shutil.copyfile(place.path, broken)
            if test:
                noticed[name] = test
            else:
                passed[name] = len(own) + len(others)
            print(f"{time.strftime('%H:%M')} {name} -> {test or f'passed {passed[name]} tests'}", flush=True)
            common.write(options, "all", {"noticed": noticed, "passed": passed, "equal": EQUAL, **common.frame()})


if __name__ == "__main__":
    main()
