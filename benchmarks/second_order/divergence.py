"""The estimated loss of every factorization next to the one that is measured: the KL from the dense model on dev rows.

    python -m benchmarks.second_order.divergence --backbone DENSE --data DIR [--work DIR] [--threads 1]

Reads the exports that ``benchmarks.second_order.run`` left in ``--work``. Writes
benchmarks/second_order/results/divergence/all.json: per cell the estimate, the measurement, and the dev accuracy. The
estimates are those of reports of 0.3.0 and before.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import common
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import divergence
from lit_compress.models.backbones import load_finetuned
from lit_compress.models.storage import load_net
from lit_compress.tasks.records import get_task

STUDY = "second_order/divergence"


def main() -> None:
    """Measure every cell with an estimate whose export is there."""
    options = common.parser(STUDY, __doc__, "backbone", "data", work=Path("runs/second_order")).parse_args()
    torch.set_num_threads(options.threads)
    data = DataModule("sst2", str(options.backbone), str(options.data))
    dense, found = load_finetuned(str(options.backbone), get_task("sst2")), {}
    for result in common.load("second_order"):
        folder, calibration = options.work / result["name"], result.get("calibration") or {}
        if calibration.get("estimated_loss") is None or not (folder / "structure.json").exists() or result["records"]:
            continue
        found[result["name"]] = {
            "cell": result["cell"], "target": result["target"], "estimated": calibration["estimated_loss"],
            "measured": divergence(load_net(folder), dense, data), "metric": result["compressed"]["metric"],
        }  # fmt: skip
        print(result["name"], found[result["name"]], flush=True)
    common.write(options, "all", {"name": "all", "cells": found, "threads": options.threads, **common.frame()})


if __name__ == "__main__":
    main()
