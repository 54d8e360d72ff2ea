"""Weightings without training on other tasks: one teacher each, at several densities.

    python -m benchmarks.second_order.tasks --backbone DIR --data DATA_DIR [--work DIR] [--threads 1] [--tasks mrpc]

DATA_DIR holds glue/<task>, squad, conll2003 as parquet; teachers, rows and lengths are those of benchmarks/tasks, but
fine-tuned for longer. Writes benchmarks/second_order/results/tasks/<task>-<cell>-<density>.json, the export's
report.json with the seconds and the peak memory of the command; existing ones are kept, so the script can be stopped
and started again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks import common
from benchmarks.second_order.run import CELLS, shortened
from benchmarks.tasks.run import TASKS, files

STUDY = "second_order/tasks"
DENSITIES = (0.25, 0.1, 0.5, 0.16)  # the most telling first
EPOCHS = {"mrpc": 5, "stsb": 5, "cola": 4, "qnli": 3, "conll2003": 3, "squad": 3}
SHOWN = ("kfac", "structures", "inputs-global", "none")  # fisher-both is of an earlier version


def main() -> None:
    """Make what is missing, density by density."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, tasks=tuple(EPOCHS), only=SHOWN)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    options.quick = False

    def teacher(task: str) -> Path:
        words = [*common.shared(options, task, files(options, task)), *TASKS[task].options]
        return common.dense_net(options, task, *words, epochs=EPOCHS[task], rate=5e-5)

    def factorize(task: str, cell: str, density: float) -> None:
        name = f"{task}-{cell}-{density:g}"
        if not common.missing(options, name):
            return
        line = [teacher(task), options.work / name, *common.source(task, files(options, task)), *TASKS[task].options]
        start = time.time()
        memory = common.command(options, "factorize", *line, "--density", density, *CELLS[cell])
        if not options.list:
            seconds = round(time.time() - start, 1)
            report = shortened(json.loads((options.work / name / "report.json").read_text()))
            made = {"name": name, "cell": cell, "target": density, "memory_mib": memory, "threads": options.threads}
            common.write(options, name, {**made, "records": [], "seconds": seconds, **report})

    for task, density, cell in ((t, d, c) for t in options.tasks for d in options.densities for c in options.only):
        factorize(task, cell, density)


if __name__ == "__main__":
    main()
