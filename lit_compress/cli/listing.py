"""The command ``list``: methods, tasks, recipes, runs."""

from __future__ import annotations

import inspect
from json import dumps
from pathlib import Path
from typing import Any, Literal

from lit_compress import methods
from lit_compress.cli.recipes import method_of, recipes
from lit_compress.run.results import read_results
from lit_compress.tasks.records import TASKS
from lit_compress.utils.errors import UserError
from lit_compress.utils.tables import print, screen_table, show

Lines = list[dict[str, Any]]


def list_(
    what: Literal["methods", "tasks", "recipes", "runs"], folder: str | None = None, *, json: bool = False
) -> None:
    """List the methods, the tasks, the recipes, or the runs of a folder.

    Args:
        what: the list to print: methods, tasks, recipes or runs.
        folder: of runs (default runs).
        json: a list of objects in place of the table.
    """
    if folder is not None and what != "runs":
        raise UserError(f"list: '{folder}' means nothing to {what}; nearest: list runs {folder}")
    lines = _runs(Path(folder or "runs")) if what == "runs" else _LISTS[what]()
    if json:
        print(dumps(lines, indent=2, ensure_ascii=False))
    else:
        header = [name.replace("_", " ") for name in lines[0]]
        show(screen_table(header, (map(_text, line.values()) for line in lines), left=len(header)))


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
    runs, _ = read_results(folder.expanduser(), "list")
    return [
        {"run": run.name, "task": run.report and run.report["task"], "method": run.label, "budget": run.budget,
         "seed": run.seed, "status": run.status, "metric": run.report and run.report["metric"]["name"],
         "dense": run.report and run.report["dense"]["metric"], "compressed": run.metric,
         "density": run.report and run.report["compressed"]["density"], "steps": run.steps,
         "minutes": None if run.seconds is None else round(run.seconds / 60, 1)}
        for run in runs
    ]  # fmt: skip


_LISTS = {"methods": _methods, "tasks": _tasks, "recipes": _recipes}
