"""FWSVD's claims on MiniLM: weightings x rank ratios without retraining, grouped truncation, and with retraining.

    python -m benchmarks.fwsvd.run --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc]

Writes benchmarks/fwsvd/results/*.json; existing ones are kept, so the script can be stopped and started again.
`python -m benchmarks.tables` makes tables and figures from them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

STUDY = "fwsvd"
WEIGHTINGS = ("none", "fisher-in")  # an earlier version also had fisher-out and fisher-both
# Fine-tuning as long as each set needs on this model: epochs of the dense model, epochs after factorization, examples.
TASKS = {"mrpc": (5, 2, None), "stsb": (3, 2, 3000), "cola": (4, 2, 4000), "sst2": (2, 1, 8000)}
DENSE_RATE, RETRAIN_RATE, DENSE_EXAMPLES = 1e-4, 5e-5, {"sst2": 16000}
SEEDS = (1, 2, 3)


def dense(options: Any, task: str) -> Path:
    """Return the fine-tuned model of a task."""
    words = common.shared(options, task, options.data / task, DENSE_EXAMPLES.get(task))
    return common.dense_net(options, task, *words, epochs=TASKS[task][0], rate=DENSE_RATE)


def analyses(options: Any, task: str) -> None:
    """Factorize the dense model without retraining: by tenths and by ratios."""
    dense_epochs, _, examples = TASKS[task]
    settings = {"task": task, "teacher_epochs": dense_epochs, "teacher_rate": DENSE_RATE, "examples": examples}
    for kind in ("truncation", "sweep"):
        name = f"{kind}-{task}"
        if kind not in options.only or not common.missing(options, name):
            continue
        out, data = options.work / name, common.source(task, options.data / task, examples)
        common.command(
            options, kind, dense(options, task), out, *data, "--weightings", *WEIGHTINGS,
            start=("-m", "benchmarks.analysis"),
        )  # fmt: skip
        if not options.list:
            rows = common.rows_of(out / f"{kind}.csv")
            common.write(options, name, {"name": name, "kind": kind, **settings, "rows": rows, **common.frame()})


def main() -> None:
    """Make what is missing."""
    parts = ("truncation", "sweep", "retrain")
    options = common.parser(STUDY, __doc__, *common.TRAINED, tasks=tuple(TASKS), only=parts, seeds=SEEDS).parse_args()
    for task in options.tasks:
        analyses(options, task)
        _, epochs, examples = TASKS[task]
        for seed in options.seeds if "retrain" in options.only else ():
            for weighting in ("none", "fisher"):
                common.fit(
                    options, f"retrain-{task}-{weighting}-in-{seed}", "--model", "FWSVD",
                    *common.shared(options, task, options.data / task, examples),
                    "--model.retrain.weighting", weighting,
                    "--model.retrain.epochs", epochs, "--model.retrain.learning_rate", RETRAIN_RATE,
                    "--seed_everything", seed, teacher=partial(dense, options, task),
                )  # fmt: skip


if __name__ == "__main__":
    main()
