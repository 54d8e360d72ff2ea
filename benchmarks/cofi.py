"""CoFi and LoSparse inside CoFi on MiniLM, beside ITP and LoSparse at the same measured density.

    python benchmarks/cofi.py --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc]

Same teacher, same examples, same number of updates for every method; CoFi's are shared out between pruning and
retraining, and all listen to the teacher. Writes benchmarks/results/cofi/*.json; existing ones are kept, so the script
can be stopped and started again. `python benchmarks/tables.py` makes the tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import RESULTS, command, dense_net, report_of, write

from lit_compress.budget import latency
from lit_compress.surgery import load_net
from lit_compress.tasks import get_task

# epochs of the dense net, examples it sees; epochs of pruning and of retraining, examples they see
TASKS = {"sst2": (2, 16000, 2, 1, 4000), "mrpc": (5, None, 2, 1, None)}  # 750 and 690 updates of BATCH examples
BATCH = 16
DENSITIES = (0.40, 0.20, 0.10)
DENSE_RATE, RATE = 1e-4, 1e-4
# Rates of gates and multipliers: two guesses for some hundred updates; the paper has ten thousand, and 0.01 for both.
RATES = {"": (0.3, 0.03), "-slow": (0.1, 0.05)}


def jobs(prune: int, retrain: int) -> dict[str, list[object]]:
    """Return name of a result -> options of its run, without task, data and folders."""
    found: dict[str, list[object]] = {}
    stages = ["--model.prune.epochs", prune, "--model.retrain.epochs", retrain, "--model.retrain.learning_rate", RATE]
    for density in DENSITIES:
        both = ["--model.prune.epochs", prune + retrain, "--model.density", density,
                "--model.distillation.alpha", 0.5]  # fmt: skip
        found[f"itp-{density:g}"] = ["--model", "ITP", *both]
        found[f"losparse-{density:g}"] = ["--model", "LoSparse", *both]
    for end, (gates, multipliers) in RATES.items():
        gated = [
            *stages, "--model.prune.gate_learning_rate", gates, "--model.prune.multiplier_learning_rate", multipliers,
            "--model.prune.target_warmup", 0.4,
        ]  # fmt: skip
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


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--work", default="runs/cofi", type=Path)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--only", nargs="+", help="names of results, e.g. cofi-0.4; all by default")
    parser.add_argument("--examples", type=int, help="training examples for all stages, to try the script")
    options = parser.parse_args()

    for task in options.tasks:
        dense_epochs, dense_examples, prune, retrain, examples = TASKS[task]
        if options.examples:
            dense_examples, examples = options.examples, options.examples
        source = ["--model.backbone", options.backbone, "--data.task", task, "--data.path", options.data / task,
                  "--trainer.precision", options.precision, "--trainer.enable_progress_bar", "false"]  # fmt: skip
        dense = dense_net(
            options.work / f"dense-{task}", *source,
            *(["--data.train_examples", dense_examples] if dense_examples else []),
            epochs=dense_epochs, rate=DENSE_RATE, threads=options.threads,
        )  # fmt: skip
        for name, words in jobs(prune, retrain).items():
            file = f"{task}-{name}"
            if (RESULTS / "cofi" / f"{file}.json").exists() or (options.only and name not in options.only):
                continue
            drawn = ["--data.train_examples", examples] if examples else []
            run = options.work / file
            command(
                "fit", *words, *source, *drawn, "--data.batch_size", BATCH, "--model.teacher", dense,
                "--model.prune.init", "finetuned", "--model.prune.learning_rate", RATE, "--run_dir", run,
                "--ckpt_path", "last", threads=options.threads,
            )  # fmt: skip
            nets = [load_net(run / "dense" / "net"), load_net(run / "export")]
            long = latency(nets, get_task(task).length, batch=32, threads=options.threads, repeats=15)
            write("cofi", file, {"name": file, **report_of(run), "latency_batch_32": long})


if __name__ == "__main__":
    main()
