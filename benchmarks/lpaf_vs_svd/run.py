"""LPAF beside truncated SVD + retraining: same teacher, same updates after it, same learning rates tried.

    python -m benchmarks.lpaf_vs_svd.run --backbone DIR --data DIR [--work DIR] [--examples 8000] [--threads 1]

LPAF prunes and retrains for ``--epochs`` each, SVD retrains for both together. 2,000 training rows are held out: the
learning rate that is best on them is the one that the table shows.

Writes benchmarks/lpaf_vs_svd/results/<run>.json, one per run (a run's report.json with its stages' metrics before and
after, and ``held_out``, the export's metrics on the held-out rows); existing ones are kept, so the script can be
stopped and started again. `python -m benchmarks.tables` makes the table from them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from benchmarks import common

STUDY = "lpaf_vs_svd"
DENSITIES = (0.25, 0.16, 0.5)
RATES = (1e-4, 3e-4)
PLAIN = {"p_init": 0.0, "consistency": 0.0}  # retraining without step 3's two ideas


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
    parser = common.parser(STUDY, __doc__, *common.TRAINED, precision="32-true", examples=8000, epochs=2)
    parser.add_argument("--teacher_examples", default=12000, type=int)
    options = parser.parse_args()
    data, held_out = common.hold_out(options, rows=2000)

    def dense() -> Path:
        words = common.shared(options, "sst2", data, options.teacher_examples)
        return common.dense_net(options, "teacher", *words, epochs=2, rate=5e-5)

    def run(name: str, *words: object, origin: str | None = None, **changes: object) -> None:
        folder = options.work / name
        source = options.work / str(origin)
        if (
            (source / "prune" / "net").is_dir()
            and common.missing(options, name)
            and not (options.list or folder.exists())
        ):
            fork(source, folder, **changes)
        common.fit(
            options, name, *common.shared(options, "sst2", data, options.examples), *words, teacher=dense,
            more=lambda made: {"held_out": common.metrics_on(made, held_out, options.threads)},
        )  # fmt: skip

    prune = ["--model.prune.epochs", options.epochs, "--model.prune.learning_rate", 1e-4]
    for density in DENSITIES:
        first = f"lpaf-{density}-{RATES[0]:g}"
        for i, rate in enumerate(RATES):
            both = ["--model.density", density, "--model.retrain.learning_rate", rate]
            lpaf = ["--model", "LPAF", *prune, *both, "--model.retrain.epochs", options.epochs]
            run(f"lpaf-{density}-{rate:g}", *lpaf, origin=first if i else None, retrain={"learning_rate": rate})
            # what LPAF spends on pruning, SVD has for retraining
            run(f"svd-{density}-{rate:g}", "--model", "SVD", *both, "--model.retrain.epochs", 2 * options.epochs)
    # v is tuned per task in the paper: at 0.16 also the net pruned to 0.25, with two values of p, and without step 3
    for rate in RATES:
        for tag, retrain in (("p0.3", {"p_init": 0.3}), ("p0.7", {"p_init": 0.7}), ("plain", PLAIN)):
            settings = {"learning_rate": rate, "epochs": options.epochs, **retrain}
            flags = [word for key, value in settings.items() for word in (f"--model.retrain.{key}", value)]
            v = ["--model", "LPAF", *prune, "--model.prune.density", 0.25, "--model.density", 0.16, *flags]
            name, origin = f"lpaf-0.16-{rate:g}-v0.25-{tag}", f"lpaf-0.25-{RATES[0]:g}"
            run(name, *v, origin=origin, density=0.16, prune={"density": 0.25}, retrain=settings)
    signed = [
        "--model", "LPAF", "--model.density", 0.25, *prune, "--model.prune.score", "signed",
        "--model.retrain.epochs", 1, "--model.retrain.learning_rate", RATES[0],
    ]  # fmt: skip
    run("lpaf-signed-0.25", *signed)
    run("lpaf-signed-0.25-prune-2e-05", *signed, "--model.prune.learning_rate", 2e-5)


if __name__ == "__main__":
    main()
