"""Dense fine-tuning and LPAF at density 0.25 on every kind of task: metric, time, memory.

    python -m benchmarks.tasks.run --backbone DIR --data DATA_DIR [--work DIR] [--threads 1] [--tasks mrpc] [--quick]

DATA_DIR holds glue/<task>, squad, conll2003 as parquet. Writes benchmarks/tasks/results/<task>.json, a run's report
with its stages' metrics and seconds, those of the dense model, and the peak memory of pruning and retraining; existing
ones are kept, so the script can be stopped and started again. ``--quick`` takes a handful of rows to see that
everything runs, and keeps its results in --work. `python -m benchmarks.tables` makes the table from them.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks import common

STUDY = "tasks"
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
COLUMNS = ["--data.custom.text", "[first, second]", "--data.custom.label", "same"]  # of the user's own file


def drawn(file: Path, rows: int | None) -> Any:
    """Return ``rows`` rows of a parquet file, evenly over all of it."""
    table = pq.read_table(file)
    if rows is None or rows >= len(table):
        return table
    return table.take([i * len(table) // rows for i in range(rows)])


def files(options: Any, task: str) -> Path:
    """Write the subsets a task is run on and return where they are."""
    setting, folder = TASKS[task], options.work / "data" / task
    path = folder / "pairs.csv" if task == "custom" else folder
    if options.list:
        return path
    train, validation = (QUICK_ROWS, QUICK_ROWS) if options.quick else (setting.train, setting.validation)
    folder.mkdir(parents=True, exist_ok=True)
    given = options.data / setting.folder
    if task == "custom":  # a user's single file, with columns and labels of their own
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["first", "second", "same"])
            rows = drawn(given / "train.parquet", train).to_pylist()
            writer.writerows([r["question1"], r["question2"], ["no", "yes"][r["label"]]] for r in rows)
        return path
    for split, count in (("train", train), ("validation", validation)):
        pq.write_table(drawn(given / f"{split}.parquet", count), folder / f"{split}.parquet")
    return path


def run(options: Any, task: str) -> None:
    """Fine-tune, then prune and retrain."""
    setting = TASKS[task]
    epochs = (1, 3, 1) if options.quick else setting.epochs
    words = [
        *common.shared(options, task, files(options, task)), *(COLUMNS if task == "custom" else []), *setting.options,
        *(["--data.batch_size", 4, "--data.eval_batch_size", 4] if options.quick else []),
    ]  # fmt: skip
    stages = {
        name: [f"--model.{name}.epochs", number, f"--model.{name}.learning_rate", rate]
        for name, number, rate in zip(("dense", "prune", "retrain"), epochs, setting.rates, strict=True)
    }
    teacher = partial(common.dense_net, options, task, *words, epochs=epochs[0], rate=setting.rates[0])

    def more(folder: Path) -> dict[str, Any]:
        records = json.loads((teacher().parents[1] / "stages.json").read_text())
        return {"dense_seconds": next(record["seconds"] for record in records if record["name"] == "dense")}

    lpaf = ["--model", "LPAF", "--model.density", DENSITY, *words, *stages["prune"], *stages["retrain"]]
    if options.quick:  # `fit` refuses a teacher that has learned nothing
        common.fit(options, task, *lpaf, *stages["dense"])
    else:
        common.fit(options, task, *lpaf, teacher=teacher, more=more)


def main() -> None:
    """Make what is missing."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, tasks=tuple(TASKS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.work = options.work / "quick"
        options.results = options.work / "results"
    for task in options.tasks:
        if common.missing(options, task):
            run(options, task)


if __name__ == "__main__":
    main()
