"""The commands that read runs: report, list, verify."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_compress import methods
from lit_compress.cli.parsers import add_consent, consent
from lit_compress.cli.recipes import method_of, recipes
from lit_compress.cli.targets import open_run
from lit_compress.run import pages
from lit_compress.run.finish import verify_run
from lit_compress.run.folder import Run
from lit_compress.run.results import read_results
from lit_compress.tasks.records import TASKS
from lit_compress.utils.errors import UserError, nearest, printable
from lit_compress.utils.tables import print

Lines = list[dict[str, Any]]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def report_command(args: list[str], about: str | None) -> None:
    """Write a page and say where it is."""
    parser = _Parser(prog="python -m lit_compress report", description=about, allow_abbrev=False)
    parser.add_argument("folder", metavar="RUN|FOLDER", help="a run, an export, a comparison or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default report in RUN|FOLDER)")
    given = parser.parse_args(args)
    print(f"page: {pages.write(Path(given.folder), given.out)}")


# ----------------------------------------------------------------------------------------------------------- list


def list_command(args: list[str], about: str | None) -> None:
    """Print a table, or JSON."""
    parser = _Parser(prog="python -m lit_compress list", description=about, allow_abbrev=False)
    parser.add_argument("what", metavar="methods|tasks|recipes|runs", help="the list to print")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="of runs (default runs)")
    parser.add_argument("--json", action="store_true", help="a list of objects in place of the table")
    given = parser.parse_args(args)
    if given.what not in _LISTS and given.what != "runs":
        raise UserError(f"list: unknown '{given.what}'; {nearest(given.what, (*_LISTS, 'runs'))}")
    if given.folder is not None and given.what != "runs":
        raise UserError(f"list: '{given.folder}' means nothing to {given.what}; nearest: list runs {given.folder}")
    lines = _runs(given.folder or Path("runs")) if given.what == "runs" else _LISTS[given.what]()
    if given.json:
        print(json.dumps(lines, indent=2, ensure_ascii=False))
    else:
        _print(lines)


def _print(lines: Lines) -> None:
    """Print the lines as a table; into a file it is as wide as it needs to be."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    shown = Table()
    for name, value in lines[0].items():
        number = isinstance(value, int | float)
        shown.add_column(name.replace("_", " "), justify="right" if number else "left", overflow="fold")
    for line in lines:
        shown.add_row(*(escape(printable(_text(value))) for value in line.values()))
    (console if console.is_terminal else Console(highlight=False, width=160)).print(shown)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _methods() -> Lines:
    """Return name, idea and recipes of every method."""
    by_method: dict[str, list[str]] = {}
    for recipe in recipes():
        by_method.setdefault(method_of(recipe), []).append(f"{recipe}.yaml")
    names = [name for name in methods.__all__ if name != "Method"]
    return [
        {"method": name, "what it does": _first(getattr(methods, name)), "recipes": by_method.get(name, [])}
        for name in names
    ]


def _first(kind: type) -> str:
    """Return the first sentence of a class's documentation."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _tasks() -> Lines:
    return [
        {"task": task.name, "kind": task.kind, "columns": list(task.text), "labels": list(task.labels),
         "metrics": list(task.metrics), "hub": " ".join(filter(None, task.hub)) if task.hub else None}
        for task in TASKS.values()
    ]  # fmt: skip


def _recipes() -> Lines:
    return [{"recipe": f"{name}.yaml", "method": method_of(name), "tasks": tasks} for name, tasks in recipes().items()]


def _runs(folder: Path) -> Lines:
    """Return the runs under a folder, finished or not.

    Raises:
        UserError: there is none.
    """
    results = read_results(folder.expanduser(), "list")
    return [
        {"run": run.name, "task": run.report and run.report["task"], "method": run.label, "budget": run.budget,
         "seed": run.seed, "status": run.status, "metric": run.report and run.report["metric"]["name"],
         "dense": run.report and run.report["dense"]["metric"], "compressed": run.metric,
         "density": run.report and run.report["compressed"]["density"], "steps": run.steps,
         "minutes": None if run.seconds is None else round(run.seconds / 60, 1)}
        for run in results.runs
    ]  # fmt: skip


_LISTS = {"methods": _methods, "tasks": _tasks, "recipes": _recipes}


# --------------------------------------------------------------------------------------------------------- verify


def verify_command(args: list[str], about: str | None) -> None:
    """Print a line per finding; the exit code is 1 if anything differs."""
    parser = _Parser(prog="python -m lit_compress verify", description=about, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    add_consent(parser)
    given = parser.parse_args(args)
    run = Run(Path(given.run).expanduser())
    parts = open_run(run, consent(given), "verify")
    differs = False
    for finding in verify_run(run, parts.method, parts.data):
        print(f"{finding.verdict}: {finding.text}", flush=True)
        differs |= finding.verdict == "differs"
    print(f"'{run.folder}' is {'NOT ' if differs else ''}what its record makes")
    if differs:
        raise SystemExit(1)
