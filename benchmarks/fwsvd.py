"""FWSVD's claims on MiniLM: weightings x rank ratios without retraining, grouped truncation, and with retraining.

    python benchmarks/fwsvd.py --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc cola stsb]

Writes benchmarks/results/fwsvd/*.json; existing ones are kept, so the script can be stopped and started again.
`python benchmarks/tables.py` makes tables and figures from them.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from common import RESULTS, command, dense_net, report_of, write

from lit_compress.export.report import commit, hardware, versions

WEIGHTINGS = ("none", "fisher-in", "fisher-out", "fisher-both")
# Fine-tuning as long as each set needs on this model: epochs of the dense net, epochs after factorization, examples.
TASKS = {"mrpc": (5, 2, None), "stsb": (3, 2, 3000), "cola": (4, 2, 4000), "sst2": (2, 1, 8000)}
DENSE_RATE, RETRAIN_RATE, DENSE_EXAMPLES = 1e-4, 5e-5, {"sst2": 16000}
SEEDS = (1, 2, 3)
ELEMENT_RATIOS = {"mrpc": (0.1, 0.2, 0.3, 0.5)}  # every ratio is solved by itself; the other tasks at 0.3 only


def number(text: str) -> float | str:
    """Return the value of a CSV cell."""
    try:
        return float(text)
    except ValueError:
        return text


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows an analysis wrote."""
    with (folder / f"{kind}.csv").open() as file:
        return [{key: number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--work", default="runs/fwsvd", type=Path)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--parts", nargs="+", default=["truncation", "sweep", "element", "retrain"])
    options = parser.parse_args()
    frame = {"versions": versions(), "hardware": hardware(), "commit": commit()}

    def missing(name: str) -> bool:
        return not (RESULTS / "fwsvd" / f"{name}.json").exists()

    for task in options.tasks:
        dense_epochs, epochs, examples = TASKS[task]
        source = ["--data.task", task, "--data.path", options.data / task]
        trainer = ["--trainer.precision", options.precision, "--trainer.enable_progress_bar", "false"]
        drawn = ["--data.train_examples", examples] if examples else []
        many = DENSE_EXAMPLES.get(task)
        net = dense_net(
            options.work / f"dense-{task}", "--model.backbone", options.backbone, *source, *trainer,
            *(["--data.train_examples", many] if many else []), epochs=dense_epochs, rate=DENSE_RATE,
            threads=options.threads,
        )  # fmt: skip
        settings = {"task": task, "teacher_epochs": dense_epochs, "teacher_rate": DENSE_RATE, "examples": examples}
        for part, kind, weightings, extra in (
            ("truncation", "truncation", WEIGHTINGS, []),
            ("sweep", "sweep", WEIGHTINGS, []),
            ("element", "sweep", ("fisher-element",), ["--ratios", *ELEMENT_RATIOS.get(task, (0.3,))]),
        ):
            name, out = f"{part}-{task}", options.work / f"{part}-{task}"
            if part in options.parts and missing(name):
                command(
                    "analyze",
                    kind,
                    net,
                    out,
                    *source,
                    *drawn,
                    "--weightings",
                    *weightings,
                    *extra,
                    threads=options.threads,
                )
                write("fwsvd", name, {"name": name, "kind": kind, **settings, "rows": rows_of(out, kind), **frame})
        for seed in SEEDS if "retrain" in options.parts else ():
            for weighting, axis in (("none", "in"), ("fisher", "in")):
                name = f"retrain-{task}-{weighting}-{axis}-{seed}"
                if missing(name):
                    command(
                        "fit", "--model", "FWSVD", "--model.backbone", options.backbone, "--model.teacher", net,
                        *source, *trainer, *drawn, "--model.retrain.weighting", weighting, "--model.retrain.axis", axis,
                        "--model.retrain.epochs", epochs, "--model.retrain.learning_rate", RETRAIN_RATE,
                        "--seed_everything", seed, "--run_dir", options.work / name, "--ckpt_path", "last",
                        threads=options.threads,
                    )  # fmt: skip
                    write("fwsvd", name, {"name": name, **report_of(options.work / name)})


if __name__ == "__main__":
    main()
