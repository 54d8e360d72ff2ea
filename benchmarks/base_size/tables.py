"""The tables of base-size encoders, from results/<task>.json."""

from __future__ import annotations

from typing import Any

from benchmarks.base_size.run import STUDY, TASKS, summary
from benchmarks.common import load, origin, percent, table
from lit_compress.evaluation.intervals import standard_error

TITLE = "A base-size encoder: MPNet, 12 x 768"
ABOUT = "All methods on `all-mpnet-base-v2` (110M parameters) on GLUE tasks, many runs at once on one GPU."

HEAD = """## Every method

Dev metric in %: accuracy on SST-2, MRPC and RTE, Matthews' correlation on CoLA, the mean of Pearson's and Spearman's correlation
on STS-B; standard errors over the dev set are {errors}. *Density*: of the stored files. A
dash: the time was over before this run. {fairness} MRPC and RTE have 400 steps.
"""
TASK = """## {name}: {rows} runs

*Held out*: the metric on the training rows that chose the epoch. *Before*: right after the compression, before training.
"""
COLUMNS = ["asked", "method", "seed", "density", "dev", "± error", "held out", "before", "of dense", "bytes", "steps", "seconds",
           "GPU, GiB"]  # fmt: skip


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Return a row for every run of a task, the best first at a density."""
    made = sorted(result["rows"], key=lambda row: (row["asked"], -row["metric"]))
    return [
        [
            row["asked"].removeprefix("density="), row["label"], str(row["seed"]), f"{row['density']:.3f}",
            percent(row["metric"]), percent(standard_error(row["interval"])),
            percent(row["held_out"]) if row["held_out"] is not None else "",
            percent(row["initial"]) if row["initial"] is not None else "", percent(row["metric"] / row["dense"]),
            f"{row['ratios']['bytes']:.2f}", f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{row['gpu_peak_mib'] / 1024:.1f}",
        ]
        for row in made
    ]  # fmt: skip


def sections() -> list[str]:
    """Return the tables."""
    results = sorted((made for made in load(STUDY) if made["rows"]), key=lambda made: TASKS.index(made["name"]))
    errors = ", ".join(
        f"{percent(standard_error(made['rows'][0]['dense_interval'] or made['rows'][0]['interval']))} on {made['name']}"
        for made in results
    )
    made = [HEAD.format(errors=errors, fairness=results[0]["fairness"]), summary(results)]
    for result in results:
        failed = "".join(f"- {name} failed: {error}\n" for name, error in result["failed"].items())
        made += [TASK.format(name=result["name"], rows=len(result["rows"])), table(COLUMNS, rows_of(result)), failed]
    return [*filter(None, made), origin(results[0], STUDY, 1)]
