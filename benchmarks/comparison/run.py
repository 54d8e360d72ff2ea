"""Comparisons of all methods by the command ``compare``, as far as their runs have been made.

    python -m benchmarks.comparison.run --backbone DIR --data DIR [--task sst2] [--work DIR]
        [--methods SecondOrder ...] [--budgets 0.1] [--seeds 1] [--learning_rates 3e-4] [--updates 1000]

Runs ``compare --config compare_<task>.yaml`` in --work and stores what is finished there: runs that were made before
are not made again. --data is the folder of the GLUE data sets. The choices are those of the command: with ``--methods``
only these are run, the others are shown as missing; ``--budgets``, ``--seeds``, ``--learning_rates`` and ``--updates``
stand in place of the config's. ``--collect`` runs nothing. Cells and claims that are stored already and that this
folder lacks are kept, if its teachers have the scores of theirs; with other teachers the script ends and writes
nothing.

Writes benchmarks/comparison/results/<task>.json (cells of compare.json, claims) and <task>/<run>.json (a run's
report.json, ``held_out``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.comparison.claims import decided

STUDY = "comparison"
TASKS = ("sst2", "stsb", "mrpc", "qnli")
KEYS = ("budgets", "seeds", "learning_rates", "updates", "hold_out", "teacher")
CHOICES = ("methods", "budgets", "seeds", "learning_rates", "updates")


def with_earlier(made: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison with the cells and claims of an earlier one, where it has none of its own.

    Raises:
        SystemExit: teachers or settings differ, so that their rows do not belong into one table.
    """
    fixed = {key for key in KEYS if key not in ("budgets", "seeds")}
    for key, now, then in (
        ("teachers_held_out", made["teachers_held_out"], before["teachers_held_out"]),
        *((key, made["config"][key], before["config"][key]) for key in sorted(fixed)),
    ):
        if now != then:
            raise SystemExit(f"{key}: {now} here, {then} in the results; remove these, or choose other --results")
    cells = {cell["name"]: cell for cell in before["cells"]}
    cells |= {cell["name"]: cell for cell in made["cells"] if cell["status"] == "done" or cell["name"] not in cells}
    known = {claim["text"]: claim for claim in before["claims"]}
    claims = [
        known.get(claim["text"], claim) if claim["verdict"] == "not measured" else claim for claim in made["claims"]
    ]
    config = made["config"] | {
        key: list(dict.fromkeys([*before["config"][key], *made["config"][key]])) for key in ("budgets", "seeds")
    }
    return made | {"cells": list(cells.values()), "claims": claims, "config": config}


def collect(options: Any, task: str, out: Path) -> None:
    """Store the finished runs of a comparison, its cells and its claims."""
    found = json.loads((out / "compare.json").read_text())
    kept = {key: found[key] for key in ("fairness", "cells", "metric", "task")} | {"claims": decided(out)}
    teachers = [json.loads(path.read_text())[0] for path in sorted(out.glob("teachers/*/stages.json"))]
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("teachers/*/report.json"))]
    made = {
        "name": task, **kept, "config": {key: found["config"][key] for key in KEYS},
        "teachers_held_out": [found["held_out"] for found in teachers],
        **{key: reports[0][key] for key in ("versions", "hardware")},  # of the machine of the runs
    }  # fmt: skip
    stored = options.results / f"{task}.json"
    if stored.exists():
        made = with_earlier(made, json.loads(stored.read_text()))
    runs, options.results = options.results, options.results / task
    for cell in found["cells"]:
        if cell["status"] != "done":
            continue
        folder = out / cell["run"]
        report = common.report_of(folder)
        held_out = report["records"][-1].get("held_out")
        about = {key: cell[key] for key in ("label", "seed", "learning_rate", "seconds")}
        common.write(options, folder.name, {
            "name": folder.name, **about, "asked": cell["budget"], "threads": options.threads, **report,
            "held_out": held_out,
        })  # fmt: skip
    options.results = runs
    common.write(options, task, made)


def main() -> None:
    """Make the runs that are asked for and missing, and store what is there."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", "work", "precision")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="a row of compare.yaml")
    for name in CHOICES:
        parser.add_argument(f"--{name}", nargs="+", default=[], help="as compare's")
    parser.add_argument("--collect", action="store_true", help="run nothing, store what is there")
    options = parser.parse_args()
    config = f"compare_{options.task}"
    out = options.work / config
    given = [word for name in CHOICES if getattr(options, name) for word in (f"--{name}", *getattr(options, name))]
    try:
        if not options.collect:
            common.command(
                options, "compare", "--config", f"{config}.yaml", "--out", out, "--model.backbone", options.backbone,
                "--data.path", options.data / options.task, "--trainer.precision", options.precision, *given,
            )  # fmt: skip
    finally:  # a run that failed costs no other
        if not options.list and (out / "compare.json").exists():
            collect(options, options.task, out)


if __name__ == "__main__":
    main()
