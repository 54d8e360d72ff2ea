"""A comparison of all methods by the command ``compare``, as far as its runs have been made.

    python -m benchmarks.comparison.run --backbone DIR --data DIR [--work DIR] [--methods SecondOrder ...]
        [--budgets 0.1] [--seeds 1] [--learning_rates 3e-4]

Runs ``compare --config compare_sst2.yaml`` in --work and stores what is finished there: runs that were made before are
not made again. --data is the folder of SST-2. The choices are those of the command: with ``--methods`` only these are
run, the others are shown as missing; ``--budgets``, ``--seeds`` and ``--learning_rates`` stand in place of the
config's. ``--collect`` runs nothing.

Writes benchmarks/comparison/results/sst2.json (cells and claims of compare.json) and sst2/<run>.json (a run's
report.json, ``held_out``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import common

STUDY, CONFIG = "comparison", "compare_sst2.yaml"
TASK = "sst2"
CHOICES = ("methods", "budgets", "seeds", "learning_rates")


def collect(options: Any, out: Path) -> None:
    """Store the finished runs of a comparison, its cells and its claims."""
    found = json.loads((out / "compare.json").read_text())
    runs, options.results = options.results, options.results / TASK
    for cell in found["cells"]:
        if cell["status"] != "done":
            continue
        folder = out / cell["run"]
        report = common.report_of(folder)
        held_out = report["records"][-1].get("held_out")
        made = {key: cell[key] for key in ("label", "seed", "learning_rate", "seconds", "memory_mib")}
        common.write(options, folder.name, {
            "name": folder.name, **made, "asked": cell["budget"], "threads": options.threads, **report,
            "held_out": held_out,
        })  # fmt: skip
    options.results = runs
    kept = {key: found[key] for key in ("fairness", "cells", "claims", "metric", "task")}
    config = {key: found["config"][key] for key in ("budgets", "seeds", "learning_rates", "updates", "hold_out")}
    teachers = [json.loads(path.read_text())[0] for path in sorted(out.glob("teachers/*/stages.json"))]
    common.write(options, TASK, {
        "name": TASK, **kept, "config": config, "teachers_held_out": [found["held_out"] for found in teachers],
        **common.frame(),
    })  # fmt: skip


def main() -> None:
    """Make the runs that are asked for and missing, and store what is there."""
    parser = common.parser(STUDY, __doc__, "backbone", "data", "work", "precision")
    for name in CHOICES:
        parser.add_argument(f"--{name}", nargs="+", default=[], help="as compare's")
    parser.add_argument("--collect", action="store_true", help="run nothing, store what is there")
    options = parser.parse_args()
    out = options.work / CONFIG.removesuffix(".yaml")
    if not options.collect:
        given = [word for name in CHOICES if getattr(options, name) for word in (f"--{name}", *getattr(options, name))]
        common.command(
            options, "compare", "--config", CONFIG, "--out", out, "--model.backbone", options.backbone,
            "--data.path", options.data, "--trainer.precision", options.precision, "--trainer.accelerator", "cpu",
            *given,
        )  # fmt: skip
    if not options.list:
        collect(options, out)


if __name__ == "__main__":
    main()
