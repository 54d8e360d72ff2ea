"""The table of the comparison and its picture, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Cell, file_density, load, origin, percent, table

STUDY = "comparison"
TITLE = "All methods by one command"
ABOUT = "`compare --config compare_sst2.yaml`: one teacher trained to its end, 4,000 updates for every method, settings chosen on held-out rows."
KEY = "val/accuracy"

HEAD = """## SST-2 with MiniLM-L6-H384: a teacher of 3 epochs on all rows, {updates:,} updates after it

{fairness}
Learning rates: {rates}; seeds: {seeds}. Accuracy in % on the dev set ({rows} sentences, a standard error about 1.1) / on the held-out
rows (0.5); the dense net has {dense}. Of dense: dev. Steps and minutes: all stages after the teacher, on a shared machine.
"""

MISSING = "Not run: {labels}.\n"

CLAIMS = """### Claims that could be decided
"""


def finished() -> list[dict[str, Any]]:
    """Return the finished runs, the best on the dev set first within a budget."""
    runs = load(f"{STUDY}/sst2")
    return sorted(runs, key=lambda run: (-file_density(run), -run["compressed"]["metric"]))


def sections() -> Iterator[str]:
    """Yield the tables, if there are results."""
    runs = finished()
    for made in load(STUDY) if runs else ():
        yield HEAD.format(
            fairness=made["fairness"], updates=made["config"]["updates"],
            rates=", ".join(f"{float(rate):g}" for rate in made["config"]["learning_rates"]),
            seeds=", ".join(map(str, made["config"]["seeds"])), rows=made["metric"]["rows"],
            dense=f"{percent(runs[0]['dense']['metric'])} / {percent(made['teachers_held_out'][0][KEY])}",
        )  # fmt: skip
        rows = [
            [
                run["asked"].removeprefix("density="), run["label"], f"{file_density(run):.3f}",
                percent(run["compressed"]["metric"]), percent(run["held_out"][KEY]) if run["held_out"] else "",
                percent(run["compressed"]["metric"] / run["dense"]["metric"]), f"{1 / run['ratios']['flops']:.2f}x",
                f"{run['ratios']['bytes']:.3f}", f"{sum(record['steps'] for record in run['records'][1:]):,}",
                f"{run['seconds'] / 60:.0f}",
            ]
            for run in runs
        ]  # fmt: skip
        head = ["budget", "method", "density", "dev", "held out", "of dense", "FLOPs", "bytes", "steps", "minutes"]
        yield table(head, rows)
        left = dict.fromkeys(
            f"{c['label']} at {c['budget'].removeprefix('density=')}" for c in made["cells"] if c["status"] != "done"
        )
        if left:
            yield MISSING.format(labels="; ".join(left))
        if decided := [claim for claim in made["claims"] if claim["verdict"] != "not measured"]:
            yield CLAIMS
            yield table(
                ["claim", "verdict", "the paper's numbers"],
                [[claim["text"], claim["verdict"], claim.get("paper") or ""] for claim in decided],
            )
        yield origin(runs[0], STUDY, runs[0]["threads"])


def overview() -> Iterator[Cell]:
    """Yield every trained run with its metric."""
    for run in finished():
        if run["learning_rate"] is not None:
            yield Cell(run["label"], [run], [run["compressed"]["metric"]])
