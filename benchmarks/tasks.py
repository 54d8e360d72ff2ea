"""Dense fine-tuning and LPAF at density 0.25 on every kind of task: metric, time, memory.

    python benchmarks/tasks.py --backbone DIR --data DATA_DIR [--work DIR] [--threads 1] [--tasks mrpc ...] [--quick]

DATA_DIR holds glue/<task>, squad, conll2003 as parquet. Writes benchmarks/results/tasks/<task>.json, a run's report
with its stages' metrics and seconds and the peak memory of the process; existing ones are kept, so the script can be
stopped and started again. ``--quick`` takes a handful of rows to see that everything runs, and writes no results.
`python benchmarks/tables.py` makes the table from them.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from common import RESULTS, command, report_of, write

DENSITY = 0.25
QUICK_ROWS = 16


@dataclass(frozen=True)
class Setting:
    """How a task is trained.

    Attributes:
        folder: of its files in DATA_DIR.
        epochs: of fine-tuning, pruning, retraining.
        train: rows, evenly drawn; None for all.
        validation: the same of the dev set.
        rates: learning rates of fine-tuning, pruning, retraining.
        options: further ones.
    """

    folder: str
    epochs: tuple[int, int, int]
    train: int | None = None
    validation: int | None = None
    rates: tuple[float, float, float] = (1e-4, 1e-4, 1e-4)
    options: tuple[str, ...] = ()


TASKS = {
    "mrpc": Setting("glue/mrpc", (4, 2, 2)),
    "rte": Setting("glue/rte", (4, 2, 2)),
    "cola": Setting("glue/cola", (2, 1, 1)),
    "stsb": Setting("glue/stsb", (3, 2, 2)),
    "qnli": Setting("glue/qnli", (3, 2, 2), 3000, 1500),
    "squad": Setting("squad", (2, 1, 1), 2500, 500, options=("--data.max_length", "256", "--data.stride", "64")),
    "conll2003": Setting("conll2003", (3, 2, 2), 5000, 1500),
    "custom": Setting("glue/qqp", (2, 2, 2), 5000),
}


def drawn(file: Path, rows: int | None) -> Any:
    """Return ``rows`` rows of a parquet file, evenly over all of it."""
    table = pq.read_table(file)
    if rows is None or rows >= len(table):
        return table
    return table.take([i * len(table) // rows for i in range(rows)])


def files(task: str, setting: Setting, source: Path, work: Path, quick: bool) -> list[str]:
    """Write the subsets a task is run on and return the options that name them."""
    train, validation = (QUICK_ROWS, QUICK_ROWS) if quick else (setting.train, setting.validation)
    folder = work / "data" / task
    folder.mkdir(parents=True, exist_ok=True)
    if task == "custom":  # a user's single file, with columns and labels of their own
        rows = drawn(source / setting.folder / "train.parquet", train).to_pylist()
        with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["first", "second", "same"])
            writer.writerows([r["question1"], r["question2"], ["no", "yes"][r["label"]]] for r in rows)
        columns = ["--data.custom.text", "[first, second]", "--data.custom.label", "same"]
        return ["--data.path", str(folder / "pairs.csv"), *columns]
    for split, rows in (("train", train), ("validation", validation)):
        pq.write_table(drawn(source / setting.folder / f"{split}.parquet", rows), folder / f"{split}.parquet")
    return ["--data.path", str(folder)]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--work", default="runs/tasks", type=Path)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    for task in options.tasks:
        if (RESULTS / "tasks" / f"{task}.json").exists() and not options.quick:
            continue
        setting, run = TASKS[task], options.work / ("quick" if options.quick else "runs") / task
        epochs = (1, 3, 1) if options.quick else setting.epochs
        stages = [
            word
            for name, number, rate in zip(("dense", "prune", "retrain"), epochs, setting.rates, strict=True)
            for word in (f"--model.{name}.epochs", number, f"--model.{name}.learning_rate", rate)
        ]
        memory = command(
            "fit", "--model", "LPAF", "--model.density", DENSITY, "--model.backbone", options.backbone,
            "--data.task", task, *files(task, setting, options.data, options.work, options.quick), *setting.options,
            "--trainer.precision", options.precision, "--trainer.enable_progress_bar", "false", *stages,
            *(["--data.batch_size", 4, "--data.eval_batch_size", 4] if options.quick else []),
            "--run_dir", run, "--ckpt_path", "last", threads=options.threads,
        )  # fmt: skip
        report = report_of(run)
        if not options.quick:
            write("tasks", task, {"name": task, "memory_mib": memory, "threads": options.threads, **report})


if __name__ == "__main__":
    main()
