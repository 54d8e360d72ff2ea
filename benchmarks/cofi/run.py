"""CoFi and LoSparse inside CoFi on MiniLM, beside ITP and LoSparse at the same measured density.

    python -m benchmarks.cofi.run --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc]

Same teacher, same examples, same number of updates for every method; CoFi's are shared out between pruning and
retraining, and all listen to the teacher. Writes benchmarks/cofi/results/<task>-<name>.json; existing ones are kept, so
the script can be stopped and started again. `python -m benchmarks.tables` makes the tables.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from lit_compress.models.accounting import latency
from lit_compress.models.storage import load_net
from lit_compress.tasks.records import get_task

STUDY = "cofi"
# epochs of the dense net, examples it sees; epochs of pruning and of retraining, examples they see
TASKS = {"sst2": (2, 16000, 2, 1, 4000), "mrpc": (5, None, 2, 1, None)}  # 750 and 690 updates of BATCH examples
BATCH = 16
DENSITIES = (0.40, 0.20, 0.10)
DENSE_RATE, RATE = 1e-4, 1e-4
# Rates of gates and multipliers: two guesses for some hundred updates; the paper has ten thousand, and 0.01 for both.
RATES = {"": (0.3, 0.03), "-slow": (0.1, 0.05)}


def rates(pair: str) -> list[object]:
    """Return the options for one of the pairs of rates."""
    gates, multipliers = RATES[pair]
    return ["--model.prune.gate_learning_rate", gates, "--model.prune.multiplier_learning_rate", multipliers]


def jobs(prune: int, retrain: int) -> dict[str, list[object]]:
    """Return name of a result -> options of its run, without task, data and folders."""
    found: dict[str, list[object]] = {}
    stages = ["--model.prune.epochs", prune, "--model.retrain.epochs", retrain, "--model.retrain.learning_rate", RATE]
    for density in DENSITIES:
        both = ["--model.prune.epochs", prune + retrain, "--model.density", density,
                "--model.distillation.alpha", 0.5]  # fmt: skip
        found[f"itp-{density:g}"] = ["--model", "ITP", *both]
        found[f"losparse-{density:g}"] = ["--model", "LoSparse", *both]
    for end in RATES:
        gated = [*stages, *rates(end), "--model.prune.target_warmup", 0.4]
        for density in DENSITIES:
            found[f"cofi-{density:g}{end}"] = ["--model", "CoFi", *gated, "--model.density", density]
        found[f"cofi_losparse-0.1{end}"] = ["--model", "CoFiLoSparse", *gated, "--model.density", 0.1]
        # six layers leave gates of layers and heads little to choose from at 0.20: more of it to the rows
        found[f"cofi_losparse-0.1-share-0.25{end}"] = [*found[f"cofi_losparse-0.1{end}"], "--model.prune.share", 0.25]
    found["cofi-0.2-labels"] = [  # CoFi's gates with the others' loss
        *found["cofi-0.2"], "--model.distillation.alpha", 0.5, "--model.distillation.alpha_layers", 0,
        "--model.distillation.alpha_labels", 0.5,
    ]  # fmt: skip
    return found


def dense(options: Any, task: str) -> Path:
    """Return the fine-tuned net of a task."""
    epochs, examples, *_ = TASKS[task]
    words = common.shared(options, task, options.data / task, options.examples or examples)
    return common.dense_net(options, task, *words, epochs=epochs, rate=DENSE_RATE)


def batches_of_32(options: Any, task: str, run: Path) -> dict[str, Any]:
    """Time dense net and export on batches of 32 texts of the task's length."""
    nets = [load_net(run / "dense" / "net"), load_net(run / "export")]
    length = get_task(task).length
    return {"latency_batch_32": latency(nets, length, batch=32, threads=options.threads, repeats=15)}


def main() -> None:
    """Make what is missing."""
    names = tuple(jobs(0, 0))
    options = common.parser(STUDY, __doc__, *common.TRAINED, "examples", tasks=tuple(TASKS), only=names).parse_args()
    for task in options.tasks:
        _, _, prune, retrain, examples = TASKS[task]
        for name, words in jobs(prune, retrain).items():
            if name in options.only:
                common.fit(
                    options, f"{task}-{name}", *words,
                    *common.shared(options, task, options.data / task, options.examples or examples),
                    "--data.batch_size", BATCH, "--model.prune.init", "finetuned", "--model.prune.learning_rate", RATE,
                    teacher=partial(dense, options, task), more=partial(batches_of_32, options, task),
                )  # fmt: skip


if __name__ == "__main__":
    main()
