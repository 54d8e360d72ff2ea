"""Results of a comparison so far: cells and chosen learning rates; ``compare.json`` and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from lit_compress.export.report import final_metric, of_program
from lit_compress.run.comparison import Cell, Job
from lit_compress.run.results import other_density
from lit_compress.run.workers import Layout, is_running
from lit_compress.utils.files import json_of, write_json
from lit_compress.utils.manifest import check_manifest
from lit_compress.utils.tables import screen_table

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
FILE = "compare.json"


def gather(place: Layout, cells: Sequence[Cell], config: dict[str, Any], command: str, task: str) -> dict[str, Any]:
    """Return the content of ``compare.json``, a function of the files in the folder.

    Args:
        place: the folder of the comparison.
        cells: of its plan.
        config: as the user gave it.
        command: that makes all of this again.
        task: of all runs.
    """
    entries = [_cell(place, cell) for cell in cells]
    done = [place.out / entry["run"] for entry in entries if entry["status"] == "done"]
    metric = of_program(_read(done[-1] / "report.json"))["metric"] if done else None
    return {
        "format": FORMAT, "config": config, "task": task, "metric": metric, "fairness": fairness(config),
        "cells": entries, "command": command,
    }  # fmt: skip


def fairness(config: dict[str, Any]) -> str:
    """Return the sentence on how the runs were made equal, for the screen and the page."""
    rates, rows = len(config["learning_rates"]), config["hold_out"]
    return (
        f"Every trained method takes {config['updates']:,} steps after the teacher and tries {rates} learning "
        f"rate{'s' if rates != 1 else ''}; rate and epoch are chosen on {rows:,} training rows that are held out, not "
        "on the dev set. Runs of one seed share teacher, training rows and their order."
    )


def _cell(place: Layout, cell: Cell) -> dict[str, Any]:
    """Return the entry of a cell: the trials, and the run that held-out rows choose."""
    trained = cell.jobs[0].rate is not None
    tried = [_tried(place, job) for job in cell.jobs]
    done = [one for one in tried if one["held_out"] is not None or (not trained and one["status"] == "done")]
    errors = [one["error"] for one in tried if one["error"]]
    error = None
    if all(one["status"] in ("done", "failed") for one in tried) and done:
        status = "done"
        if errors:
            error = f"{len(errors)} of {len(tried)} learning rates failed: {errors[0]}"
    elif len(errors) == len(tried):
        status, error = "failed", errors[0]
    else:
        status = "running" if any(one["status"] == "running" for one in tried) else "missing"
        error = errors[0] if errors else None
    chosen = tried[0]
    if status == "done" and trained:
        chosen = max(done, key=lambda one: one["rank"])
    for one in tried:
        one.pop("rank")
    return {
        "name": cell.name, "method": cell.method, "label": cell.label, "budget": cell.budget, "seed": cell.seed,
        "learning_rate": chosen["learning_rate"] if status == "done" else None, "tried": tried if trained else [],
        "status": status, "error": error, "run": chosen["run"],
        "seconds": sum(one["seconds"] or 0 for one in tried), "memory_mib": chosen["memory_mib"],
    }  # fmt: skip


def _tried(place: Layout, job: Job) -> dict[str, Any]:
    """Return the entry of a learning rate; ``rank`` is larger for a better metric on the held-out rows."""
    error, held_out, rank, memory = place.error(job), None, None, None
    if place.done(job):
        status, report = "done", _read(place.out / job.folder / "report.json")
        records = _read(place.out / job.folder / "stages.json")
        memory = max((record.get("peak_mib") or 0 for record in records), default=0) or None
        scores = records[-1].get("held_out") or {}
        held_out = scores.get(f"val/{report['metric']['name']}")
        rank = held_out and (held_out if report["metric"]["mode"] == "max" else -held_out)
        rank = float("-inf") if held_out is None else rank
    else:
        status = "failed" if error else "running" if is_running(place, job) else "missing"
    state = place.state(job)
    return {
        "learning_rate": job.rate, "held_out": held_out, "run": job.folder.as_posix(), "status": status, "error": error,
        "seconds": state.get("seconds"), "memory_mib": memory, "rank": rank,
    }  # fmt: skip


def _read(path: Path) -> Any:
    """Return the content of a record of a run."""
    check_manifest(f"out: '{path.parent}'", path.parent, path.name)
    return json_of(path)


def write(place: Layout, comparison: dict[str, Any]) -> None:
    """Write ``compare.json``."""
    write_json(place.out / FILE, comparison)


def table(comparison: dict[str, Any], place: Layout) -> Table:
    """Return the table for the screen: the dev metric of every method at every budget, over the seeds."""
    budgets = list(dict.fromkeys(cell["budget"] for cell in comparison["cells"]))
    body = []
    for label in dict.fromkeys(cell["label"] for cell in comparison["cells"]):
        mine = [cell for cell in comparison["cells"] if cell["label"] == label]
        body.append([label, *(_shown([c for c in mine if c["budget"] == budget], place) for budget in budgets)])
    return screen_table(["method", *budgets], body)


def _shown(cells: Sequence[dict[str, Any]], place: Layout) -> str:
    reports = [_read(place.out / cell["run"] / "report.json") for cell in cells if cell["status"] == "done"]
    values = [final_metric(report) for report in reports]
    left = {status: sum(cell["status"] == status for cell in cells) for status in ("failed", "running", "missing")}
    rest = ", ".join(f"{count} {status}" for status, count in left.items() if count)
    if not values:
        return rest
    text = f"{mean(values):.4f}" + (f" ± {stdev(values):.4f} ({len(values)})" if len(values) > 1 else "")
    stored = other_density(cells[0]["budget"], mean(report["compressed"]["density"] for report in reports))
    text += "" if stored is None else f", stored {stored:.3f}"
    return f"{text}, {rest}" if rest else text
