"""LPAF beside truncated SVD + retraining: same teacher, same updates after factorization, same learning rates tried.

    python benchmarks/lpaf_vs_svd.py --backbone DIR --data DIR [--examples 8000] [--threads 1]

Writes benchmarks/results/lpaf_vs_svd/<run>.json, one per run (a run's report.json with its stages' metrics before and
after); existing ones are kept, so the script can be stopped and started again. `python benchmarks/tables.py` makes
the table from them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml
from common import RESULTS, command, report_of, write

DENSITIES = (0.25, 0.5, 0.16)
RATES = (1e-4, 3e-4)
PLAIN = {"p_init": 0.0, "consistency": 0.0}  # retraining without step 3's two ideas


def fit(run: Path, options: argparse.Namespace, examples: int, *extra: str) -> None:
    """Run one `fit` through the command line."""
    command(
        "fit", "--model.backbone", options.backbone, "--data.task", "sst2", "--data.path", options.data,
        "--data.train_examples", examples, "--trainer.precision", options.precision,
        "--trainer.enable_progress_bar", "false", "--run_dir", run, "--ckpt_path", "last", *extra,
        threads=options.threads,
    )  # fmt: skip


def fork(source: Path, target: Path, **changes: dict[str, object]) -> None:
    """Copy a run up to its pruned net, to factorize and retrain it otherwise; ``changes`` are of the method."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for stage in ("dense", "prune"):
        shutil.copytree(source / stage, target / stage)
    records = [r for r in json.loads((source / "stages.json").read_text()) if r["name"] != "retrain"]
    (target / "stages.json").write_text(json.dumps(records))
    config = yaml.safe_load((source / "config.yaml").read_text())
    init = config["model"]["init_args"]
    for key, value in changes.items():
        init[key] = init[key] | value if isinstance(value, dict) else value
    (target / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def main() -> None:
    """Make what is missing, the most telling density first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", default="runs/lpaf_vs_svd", type=Path)
    parser.add_argument("--teacher_examples", default=12000, type=int)
    parser.add_argument("--examples", default=8000, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--threads", default=2, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    epochs = str(options.epochs)
    teacher: list[str] = []

    def run(name: str, *extra: str, source: str | None = None, **changes: object) -> None:
        if (RESULTS / "lpaf_vs_svd" / f"{name}.json").exists():
            return
        folder = options.work / name
        if source and not folder.exists():
            fork(options.work / source, folder, **changes)
        fit(folder, options, options.examples, *teacher, *extra)
        write("lpaf_vs_svd", name, report_of(folder))

    dense = options.work / "dense-teacher"
    if not (dense / "dense" / "net").exists():  # density 1: nothing is factorized; only the dense stage is used
        fit(dense, options, options.teacher_examples, "--model", "SVD", "--model.density", "1.0",
            "--model.dense.epochs", "2", "--model.dense.learning_rate", "5e-5", "--model.retrain.epochs", "1",
            "--model.retrain.learning_rate", "1e-5")  # fmt: skip
    teacher += ["--model.teacher", str(dense / "dense" / "net")]
    prune = ["--model.prune.epochs", epochs, "--model.prune.learning_rate", "1e-4"]
    for density in DENSITIES:
        common = ["--model.density", str(density), "--model.retrain.epochs", epochs, "--model.retrain.learning_rate"]
        for i, rate in enumerate(RATES):
            first = f"lpaf-{density}-{RATES[0]:g}"
            lpaf = ["--model", "LPAF", *prune, *common, str(rate)]
            run(f"lpaf-{density}-{rate:g}", *lpaf, source=first if i else None, retrain={"learning_rate": rate})
            run(f"svd-{density}-{rate:g}", "--model", "SVD", *common, str(rate))
    # v is tuned per task in the paper: at 0.16 also the net pruned to 0.25, with two values of p, and without step 3
    for rate in RATES:
        for tag, retrain in (("p0.3", {"p_init": 0.3}), ("p0.7", {"p_init": 0.7}), ("plain", PLAIN)):
            settings = {"learning_rate": rate, "epochs": options.epochs, **retrain}
            flags = [text for key, value in settings.items() for text in (f"--model.retrain.{key}", str(value))]
            v = ["--model", "LPAF", *prune, "--model.prune.density", "0.25", "--model.density", "0.16", *flags]
            name, source = f"lpaf-0.16-{rate:g}-v0.25-{tag}", f"lpaf-0.25-{RATES[0]:g}"
            run(name, *v, source=source, density=0.16, prune={"density": 0.25}, retrain=settings)
    signed = ["--model", "LPAF", "--model.density", "0.25", *prune, "--model.prune.score", "signed",
              "--model.retrain.epochs", "1", "--model.retrain.learning_rate", str(RATES[0])]  # fmt: skip
    run("lpaf-signed-0.25", *signed)
    low = [*signed, "--model.prune.learning_rate", "2e-5"]
    run("lpaf-signed-0.25-prune-2e-05", *low)


if __name__ == "__main__":
    main()
