"""Ranks by milliseconds next to ranks by parameters: the time of exports with the same estimated loss.

    python -m benchmarks.second_order.price --backbone DIR --data DIR [--work DIR] [--teachers DIR] [--threads 1]

The teacher and the rows of benchmarks.second_order.run. ``factorize`` at several budgets of either price, all with the
same calibration. All exports take turns, one text of the task's median length in PyTorch, which is what the price in
milliseconds measures, and in ONNX Runtime; the clock is the processor time of the process. Between two exports by
parameters the logarithms of loss and time are taken as linear, so that every export by milliseconds has one with the
same loss next to it.

Writes benchmarks/second_order/results/price/minilm.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.second_order.run import shortened

STUDY, NAME = "second_order/price", "minilm"
BUDGETS = {
    "parameters": (0.5, 0.4, 0.3, 0.25, 0.2, 0.16, 0.12, 0.1), "milliseconds": (0.6, 0.5, 0.4, 0.35, 0.3, 0.25),
}  # fmt: skip
LENGTH, ROUNDS = 12, 60  # the median length of SST-2's dev set, near enough
RUNTIMES = ("eager", "onnx")


def at_loss(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the time at a loss on a curve of (loss, time), linear in logarithms; None beyond its ends."""
    for (low, fast), (high, slow) in pairwise(sorted(curve)):
        if low <= loss <= high:
            share = (log(loss) - log(low)) / (log(high) - log(low))
            return exp((1 - share) * log(fast) + share * log(slow))
    return None


def times(folders: dict[str, Path], threads: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of every export in every runtime, in turns."""
    from lit_compress.export.benched import BenchedNet, Settings
    from lit_compress.export.runtimes import RUNTIMES as KNOWN
    from lit_compress.utils.timing import in_turns, pinned

    runs = {}
    for name, folder in folders.items():
        work = folder.with_name(f"{folder.name}-programs")
        work.mkdir(exist_ok=True)
        source = BenchedNet(f"{time.time_ns()}", folder, Settings(threads=threads), work)
        for runtime in RUNTIMES:
            loaded = KNOWN[runtime].load(source.file(KNOWN[runtime].reads), source.setting)
            runs[name, runtime] = partial(loaded, source.inputs(1, LENGTH))
    with pinned(threads):
        found = in_turns(list(runs.values()), ROUNDS, clock=time.process_time)
    made: dict[str, dict[str, float]] = {}
    for (name, runtime), record in zip(runs, found, strict=True):
        made.setdefault(name, {})[runtime] = median(record)
    return made


def main() -> None:
    """Make the exports that are missing, then time all of them."""
    options = common.parser(STUDY, __doc__, *common.TRAINED, precision="32-true").parse_args()
    data, held_out = common.hold_out(options, rows=2000)
    words = common.shared(options, "sst2", data, 12000)
    dense = common.dense_net(options, "teacher", *words, epochs=2, rate=5e-5)
    folders = {"dense": dense}
    for price, budgets in BUDGETS.items():
        for budget in budgets:
            out = folders[f"{price} {budget:g}"] = options.work / f"{price}-{budget:g}"
            if options.list == "all" or not (out / "report.json").is_file():
                line = [dense, out, *common.source("sst2", data), "--density", budget, "--price", price]
                common.command(options, "factorize", *line)
    if options.list or not common.missing(options, NAME):
        return
    measured, cells = times(folders, options.threads), []
    for price, budgets in BUDGETS.items():
        for budget in budgets:
            name = f"{price} {budget:g}"
            report = shortened(json.loads((folders[name] / "report.json").read_text()))
            cells.append({
                "price": price, "budget": budget, "density": report["compressed"]["density"],
                "metric": report["compressed"]["metric"], "flops": 1 / report["ratios"]["flops"],
                "held_out": common.metrics_on(folders[name], held_out, options.threads),
                **{key: report["calibration"][f"{key}_loss"] for key in ("estimated", "measured")},
                "milliseconds": measured[name],
            })  # fmt: skip
    by_parameters: list[dict[str, Any]] = [cell for cell in cells if cell["price"] == "parameters"]
    for cell in cells:
        for runtime in RUNTIMES if cell["price"] == "milliseconds" else ():
            curve = [(other["estimated"], other["milliseconds"][runtime]) for other in by_parameters]
            beside = at_loss(curve, cell["estimated"])
            cell.setdefault("faster", {})[runtime] = beside and beside / cell["milliseconds"][runtime]
    common.write(options, NAME, {
        "name": NAME, "cells": cells, "dense": measured["dense"], "length": LENGTH, "rounds": ROUNDS,
        "threads": options.threads, **common.frame(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
