"""The tables of what a training step asks of a device, from results/*.json."""

from __future__ import annotations

from typing import Any

from benchmarks.common import load, origin, table
from benchmarks.device import gpu_tables
from benchmarks.device.run import METHODS

TITLE = "What a training step asks of a device"
ABOUT = "Waits of the host, copies and operator calls per training step of every method and stage, on a device that counts them."

HEAD = """## Per training step

A BERT of 4 layers, batches of 8 texts, every method's defaults at density 0.5. Medians over the steps of a stage, from the end of one
batch to the end of the next; *at most* is in a step that computes a threshold or logs. A wait: the host reads a value or a size of the
device. A call: an operator that runs on the device, one for a list of tensors. Calls *x dense*: without the teacher's forward, over
those of the method's dense stage, which has no teacher. *Before*: the same script on commit 98f2225; an empty cell was not
counted there.
"""

ACCELERATOR = """## On an accelerator

`python -m benchmarks.device.accelerator` runs every method in bf16-mixed on the accelerator of a machine and on its CPU, and LPAF, SecondOrder and
SP3 on a BERT-base (random weights, batches of 32 texts of 60 to 120 words) for 200 steps in every stage. `tests/test_accelerator.py` runs it on the
tests' second device.
"""


def rows_of(results: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (method, stage) -> counts."""
    return {(result["method"], row["stage"]): row for result in results for row in result["rows"]}


def accelerator() -> list[str]:
    """Return the tables of an accelerator."""
    found = load("device/accelerator")
    if not found:
        return [ACCELERATOR, "Not measured: no machine with an accelerator was there.\n"]
    made = {part: [result for result in found if result["part"] == part] for part in ("contract", "steps")}
    equal = [
        [result["method"], row["net"], *(f"{row[name]:.3g}" for name in ("largest", "device", "rounding")),
         ", ".join(f"{count} {dtype}" for dtype, count in row["products"].items())]
        for result in made["contract"] for row in result["rows"]
    ]  # fmt: skip
    times = [
        [result["method"], row["name"], str(row["steps"]), f"{row['seconds']:.1f}", f"{row['gpu_peak_mib']:.0f}"]
        for result in made["steps"] for row in result["rows"]
    ]  # fmt: skip
    head = ["method", "model", "largest logit", "device - CPU, both bf16", "CPU: bf16 - float32", "matrix products"]
    left = [method for method in METHODS if method not in {result["method"] for result in made["contract"]}]
    return [
        ACCELERATOR, table(head, equal),
        table(["method", "stage", "steps", "seconds", "peak memory so far, MiB"], times) if times
        else "Seconds and memory of 200 steps: not measured.\n",
        *([f"No row of {', '.join(left)}: not measured.\n"] if left else []),
        f"Made on {found[0]['hardware']['accelerator']}, torch {found[0]['versions']['torch']}.\n",
    ]  # fmt: skip


def sections() -> list[str]:
    """Return the tables."""
    found = load("device")
    results = [result for result in found if not result["name"].endswith("before")]
    before = rows_of([result for result in found if result["name"].endswith("before")])
    now, rows = rows_of(results), []
    for method, stage in sorted(now, key=lambda key: list(METHODS).index(key[0])):
        row, dense = now[method, stage], now[method, "dense"]
        if stage == "dense" and method != next(iter(METHODS)):
            continue  # it is the same for all
        old = before.get(("LPAF" if stage == "dense" else method, stage))
        rows.append([
            method if stage != "dense" else "all", stage, f"{old['waits']:g}" if old else "", f"{row['waits']:g}",
            f"{old['most']['waits']}" if old else "", f"{row['most']['waits']}",
            f"{row['to_device']:g}", f"{row['to_host']:g}",
            f"{old['calls']:.0f}" if old else "", f"{row['calls']:.0f}", f"{row['teacher']:.0f}",
            f"{(row['calls'] - row['teacher']) / dense['calls']:.2f}",
        ])  # fmt: skip
    header = ["method", "stage", "waits before", "waits", "at most before", "at most", "copies to the device",
              "to the host", "calls before", "calls",
              "of them the teacher's", "x dense"]  # fmt: skip
    made = [HEAD, table(header, rows), *([origin(results[0], "device", 1)] if results else [])]
    return [*made, *accelerator(), *gpu_tables.sections()]
