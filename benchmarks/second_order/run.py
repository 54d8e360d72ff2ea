"""Second-order compression: weightings, allocations, and what is removed, at several densities; then with training.

    python -m benchmarks.second_order.run --backbone DIR --data DIR [--work DIR] [--teachers DIR] [--threads 1]

One teacher, fine-tuned on SST-2; 2,000 training rows are held out. Every cell is one ``factorize``, which calibrates on
1,024 of the other training rows, and is scored on the dev set and on the held-out rows. The cells ``trained`` are
runs of ``fit`` with steps, data, teacher and learning rates of benchmarks/lpaf_vs_svd, whose rows are next to them.

Writes benchmarks/second_order/results/<cell>.json (the export's report.json, ``held_out``, ``seconds``); existing ones
are kept, so the script can be stopped and started again. `python -m benchmarks.tables` makes the tables from them.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

STUDY = "second_order"
DENSITIES = (0.5, 0.25, 0.16, 0.1)
RATES = (3e-4, 1e-4)
EXAMPLES, EPOCHS = 8000, 4  # 1,000 steps: what LPAF spends on pruning and retraining there
TRAINED_DENSITIES = (0.16, 0.25)
STRUCTURED = (0.5, 0.34, 0.25, 0.16)
TARGETS = {"structures": STRUCTURED}
CELLS: dict[str, list[str]] = {
    # an earlier version made the stored rows with K-FAC from labels that were drawn, but for kfac-exact, as it is now
    "kfac": [],
    "kfac-exact": [],
    "structures": ["--removes", "structures"],
    "none": ["--weighting", "none"],
    "fisher-in": ["--weighting", "fisher", "--fisher_examples", "1024"],  # fisher-both is of an earlier version
    "inputs": ["--weighting", "inputs", "--allocation", "uniform"],
    "inputs-global": ["--weighting", "inputs", "--allocation", "global"],
    "kfac-examples-64": ["--calibration_examples", "64"],
    "kfac-examples-256": ["--calibration_examples", "256"],
    "kfac-examples-4096": ["--calibration_examples", "4096"],
    "kfac-seed-1": ["--seed_everything", "1"],
    "kfac-seed-2": ["--seed_everything", "2"],
    "kfac-seed-3": ["--seed_everything", "3"],
    "kfac-seed-4": ["--seed_everything", "4"],
}
TRAINED = {  # distillation of logits as in lpaf_vs_svd, and of hidden states too, as is the default
    "trained-logits": ["--model.distillation.alpha_layers", 0],
    "trained-hidden": [],
}


def main() -> None:
    """Make what is missing, the method itself first, the ablations at one density last."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, only=(*CELLS, *TRAINED), precision="32-true")
    parser.add_argument("--teacher_examples", default=12000, type=int)
    options = parser.parse_args()
    data, held_out = common.hold_out(options, rows=2000)
    words = common.shared(options, "sst2", data, options.teacher_examples)

    def dense() -> Path:
        return common.dense_net(options, "teacher", *words, epochs=2, rate=5e-5)

    def factorize(cell: str, density: float) -> None:
        name = f"{cell}-{density}"
        if cell not in options.only or not common.missing(options, name):
            return
        net, out, start = dense(), options.work / name, time.time()
        line = [net, out, *common.source("sst2", data), "--density", density, *CELLS[cell]]
        memory = common.command(options, "factorize", *line)
        if options.list:
            return
        seconds = time.time() - start
        report = shortened(json.loads((out / "report.json").read_text()))
        made = {"name": name, "cell": cell, "target": density, "memory_mib": memory, "threads": options.threads,
                "records": []}  # fmt: skip
        scored = {"held_out": common.metrics_on(out, held_out, options.threads), "seconds": round(seconds, 1)}
        common.write(options, name, {**made, **scored, **report})

    for cell in CELLS:
        ablation = cell.startswith("kfac-") and cell != "kfac-exact"
        for density in (0.16,) if ablation else TARGETS.get(cell, DENSITIES):
            factorize(cell, density)

    def trained(cell: str, density: float, made: Path) -> dict[str, Any]:
        return {"cell": cell, "target": density, "held_out": common.metrics_on(made, held_out, options.threads)}

    for density, rate, cell in ((d, r, c) for d in TRAINED_DENSITIES for r in RATES for c in TRAINED):
        if cell in options.only:
            common.fit(
                options, f"{cell}-{density}-{rate:g}", *common.shared(options, "sst2", data, EXAMPLES),
                "--model", "SecondOrder", "--model.density", density, *TRAINED[cell],
                "--model.retrain.epochs", EPOCHS, "--model.retrain.learning_rate", rate, teacher=dense,
                more=partial(trained, cell, density),
            )  # fmt: skip


def shortened(report: dict) -> dict:
    """Return a report of ``factorize`` without local paths."""
    for key in ("backbone", "path"):
        report["config"]["data"][key] = Path(report["config"]["data"][key]).name
    report["config"]["model"]["init_args"]["backbone"] = "dense"
    report["config"].pop("run_dir", None)
    return report


if __name__ == "__main__":
    main()
