"""Waits, copies and operator calls of a training step of every method, on a second device that counts them.

    python -m benchmarks.device.run [--only LPAF CoFi]

Runs every method on a BERT of 4 layers with random weights. The device is the tests' (tests/second_device): its memory
is the CPU's, so that its times mean nothing, and its counts are those of an accelerator. It needs a C++ compiler.
Writes benchmarks/device/results/METHOD.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.scaling.run import write_inputs

STUDY = "device"
WIDTH, LAYERS, TEXTS = 64, 4, (4, 9)
PRUNE = ["--model.prune.epochs", "2"]
RETRAIN = ["--model.retrain.epochs", "2"]
ROWS = [*PRUNE, "--model.prune.interval", "4"]
GATES = [*PRUNE, *RETRAIN, "--model.distil.epochs", "2"]
METHODS: dict[str, list[str]] = {
    "SVD": RETRAIN,
    "FWSVD": RETRAIN,
    "SecondOrder": RETRAIN,
    "LPAF": [*PRUNE, *RETRAIN],
    "Magnitude": PRUNE,
    "FirstOrder": PRUNE,
    "PLATON": [*ROWS, "--model.prune.start", "0.2"],
    "LoSparse": ROWS,
    "LowRankI": RETRAIN,
    "LowRankII": ROWS,
    "ITP": ROWS,
    "Movement": PRUNE,
    "BlockMovement": [*PRUNE, *RETRAIN, "--model.prune.block", "8"],
    "CoFi": GATES,
    "CoFiLoSparse": [*GATES, "--model.prune.interval", "4"],
    "SP3": [*PRUNE, "--model.prune.tokens", "1000"],
    "FLOP": PRUNE,
    "Theseus": ["--model.replace.epochs", "2"],
    "LLMPruner": PRUNE,
    "SliceGPT": PRUNE,
    "Layers": PRUNE,
}


def measure(method: str, *words: str) -> list[dict[str, Any]]:
    """Return what the steps of every stage ask of the device, which this process has; ``words`` are further options.

    Each number is the median over the steps; ``most`` are the largest, in steps that log or compute thresholds.
    """
    from benchmarks.device.counting import FILE
    from lit_compress.__main__ import main

    with tempfile.TemporaryDirectory() as work:
        place, run = Path(work), Path(work, "run")
        write_inputs(place, WIDTH, LAYERS, TEXTS)
        main([
            "fit", "--model", method, "--model.density", "0.5", "--model.dense.epochs", "2", *METHODS[method],
            "--model.backbone", str(place / "net"), "--data.task", "sst2", "--data.path", work,
            "--data.batch_size", "8", "--trainer.accelerator", "second", "--run_dir", str(run),
            "--trainer.enable_progress_bar", "false", "--trainer.logger", "false",
            "--trainer.callbacks+=benchmarks.device.counting.Counts", *words,
        ])  # fmt: skip
        names = [record["name"] for record in json.loads((run / "stages.json").read_text())]
        found = {name: json.loads((run / name / FILE).read_text()) for name in names}
    return [
        {
            "stage": stage,
            **{name: median(step[name] for step in steps) for name in steps[0]},
            "most": {name: max(step[name] for step in steps) for name in steps[0]},
        }
        for stage, steps in found.items()
    ]


def _measure_and_write(options: Any, method: str) -> None:
    """Measure in a process of its own: autograd counts the devices only once."""
    from benchmarks.device.counting import second_device

    second_device.start()
    from quick import quick_runs  # the tests' way to time little; the import above has put them on the path

    with quick_runs():
        rows = measure(method)
    result = {"name": method, "method": method, "layers": LAYERS, "width": WIDTH, "rows": rows, **common.frame()}
    common.write(options, method, result)


def main() -> None:
    """Measure all methods that have no result."""
    options = common.parser(STUDY, __doc__, only=tuple(METHODS)).parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    import torch

    import lit_compress.cli.commands
    import lit_compress.methods  # noqa: F401  imported once, before the forks

    torch.set_num_threads(options.threads)
    for method in options.only:
        if not (options.results / f"{method}.json").exists():
            process = multiprocessing.get_context("fork").Process(target=_measure_and_write, args=(options, method))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{method}: the process ended with {process.exitcode}")


if __name__ == "__main__":
    main()
