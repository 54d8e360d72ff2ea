"""Programs of 8-bit integers next to float32: metric and time, dense and compressed, on three tasks.

    python -m benchmarks.size.int8 --backbone DIR --data DATA_DIR [--work DIR] [--teachers DIR] [--threads 1]

DATA_DIR holds glue/<task> as parquet. One teacher per task. Its dense model, and that model without training at a
quarter of the blocks' matrices (factors; heads and neurons), become an ONNX program in float32 and one in 8 bits,
weights and activations, by ``export --dtype int8``. Both are scored on the dev set. The two of a compressed model and
the two of the dense one take turns in ONNX Runtime; the clock is the processor time of the process.

Writes benchmarks/size/results/int8/<task>-<cell>.json (the run's report.json; ``int8``: metric and bytes of that
program; ``times``); existing ones are kept, so the script can be stopped and started again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

SCRIPT = "size/int8"
DENSITY = 0.25
# training rows of the teacher (None: all) and its epochs
TASKS: dict[str, tuple[int | None, int]] = {"sst2": (12000, 2), "mrpc": (None, 5), "stsb": (None, 5)}
FACTORS: list[object] = ["SecondOrder", "--model.density", DENSITY, "--model.retrain.epochs", 0]
CELLS: dict[str, list[object]] = {
    "dense": ["SVD", "--model.density", 1.0, "--model.retrain.epochs", 0],
    "second_order": FACTORS,
    "structures": [*FACTORS, "--model.retrain.removes", "structures"],
}
SHAPES = ((1, 32), (1, 128), (32, 32), (32, 128))  # texts x tokens
ROUNDS = 15


def times(programs: dict[str, Path], threads: int) -> list[dict[str, Any]]:
    """Time programs in turns: milliseconds, and how many times faster the last is than each of the others."""
    import numpy

    from lit_compress.export.runtimes import RUNTIMES, Setting
    from lit_compress.utils.timing import in_turns, speedup, summary

    runs = {name: RUNTIMES["onnx"].load(path, Setting(("logits",), threads)) for name, path in programs.items()}
    rows = []
    for texts, tokens in SHAPES:
        ids = numpy.random.default_rng(0).integers(1000, 20000, (texts, tokens))
        inputs = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
        turns = [partial(run, inputs) for run in runs.values()]
        found = in_turns(turns, ROUNDS, warm_up=2, seconds=60, clock=time.process_time)
        record = dict(zip(runs, found, strict=True))
        last = list(record)[-1]
        rows.append({
            "texts": texts, "tokens": tokens, "milliseconds": {name: summary(each) for name, each in record.items()},
            "faster_than": {name: asdict(speedup(each, record[last])) for name, each in record.items() if name != last},
        })  # fmt: skip
    return rows


def main() -> None:
    """Make what is missing: the dense model of a task, then what is next to it."""
    options = common.parser(SCRIPT, __doc__, *common.TRAINED, tasks=tuple(TASKS), only=tuple(CELLS)).parse_args()

    def small(name: str) -> Path:
        return options.work / f"{name}-int8"

    def more(run: Path, task: str) -> dict[str, Any]:
        common.command(options, "export", run, small(run.name), "--format", "onnx", "--dtype", "int8")
        made: dict[str, Any] = {"cell": run.name.removeprefix(f"{task}-")}
        made["int8"] = json.loads((small(run.name) / "report.json").read_text())["program"]
        dense = options.work / f"{task}-dense"
        if run != dense:
            folders = {"dense": dense / "export", "dense int8": small(dense.name), "float32": run / "export",
                       "int8": small(run.name)}  # fmt: skip
            files = {name: folder / "model.onnx" for name, folder in folders.items()}
            made["times"] = times(files, options.threads)
        return made

    for task in options.tasks:
        data, (examples, epochs) = options.data / "glue" / task, TASKS[task]
        words = common.shared(options, task, data, examples)
        for cell in options.only:
            common.fit(
                options, f"{task}-{cell}", *words, "--model", *CELLS[cell], "--export.format", "onnx",
                teacher=partial(common.dense_net, options, task, *words, epochs=epochs, rate=5e-5),
                more=partial(more, task=task),
            )  # fmt: skip


if __name__ == "__main__":
    main()
