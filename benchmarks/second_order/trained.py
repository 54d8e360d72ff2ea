"""Methods after the same training from the same teacher: as many updates, the same distillation, the same search.

    python -m benchmarks.second_order.trained --backbone DIR --data DIR [--work DIR] [--teachers DIR] [--threads 1]

One teacher, fine-tuned on SST-2; 2,000 training rows are held out, and choose each method's learning rate. Every
run makes 1,000 updates after the teacher, those of pruning included. Labels, the teacher's logits and its hidden states
teach all methods alike; CoFi and SP3 compare hidden states in their own ways, and have their own weights.

Writes benchmarks/second_order/results/trained/<method>-<density>-<rate>.json (a run's report.json, ``held_out``);
existing ones are kept, so the script can be stopped and started again.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import common
from benchmarks.sp3.run import GATED

STUDY = "second_order/trained"
DENSITIES = (0.1, 0.25, 0.06, 0.16, 0.03)  # the most telling first
RATES = (3e-4, 1e-4)
EXAMPLES, EPOCHS = 8000, 4  # 1,000 updates
TAUGHT = ["--model.distillation.alpha", 0.5, "--model.distillation.alpha_layers", 5,
          "--model.distillation.mask_padding", "true", "--model.distillation.relative", "true"]  # fmt: skip


def only(stage: str) -> list[object]:
    """Return the epochs of a method that has one stage after the teacher."""
    return [f"--model.{stage}.epochs", EPOCHS]


HALVES = ["--model.prune.epochs", EPOCHS // 2, "--model.retrain.epochs", EPOCHS // 2]
ROWS = [*only("prune"), "--model.prune.init", "finetuned", "--model.prune.start", 0.1, "--model.prune.end", 0.3]
# class, the stages whose learning rate is tried, options
METHODS: dict[str, tuple[str, list[str], list[object]]] = {
    "second_order": ("SecondOrder", ["retrain"], only("retrain")),
    "lpaf": ("LPAF", ["prune", "retrain"], HALVES),
    "fwsvd": ("FWSVD", ["retrain"], only("retrain")),
    "fwsvd-both": ("FWSVD", ["retrain"], [*only("retrain"), "--model.retrain.axis", "both"]),
    "losparse": ("LoSparse", ["prune"], ROWS),
    "itp": ("ITP", ["prune"], ROWS),
    "cofi": ("CoFi", ["prune", "retrain"], [*HALVES, *GATED["CoFi"]]),
    "sp3": ("SP3", ["prune"], [*only("prune"), *GATED["SP3"]]),
    "structures": ("SecondOrder", ["retrain"], [*only("retrain"), "--model.retrain.removes", "structures"]),
    "lpaf-kfac": ("LPAF", ["prune", "retrain"], [*HALVES, "--model.retrain.weighting", "kfac"]),
    "losparse-kfac": ("LoSparse", ["prune"], [*ROWS, "--model.prune.weighting", "kfac"]),
    "svd": ("SVD", ["retrain"], only("retrain")),
}
OWN = ("cofi", "sp3")  # distillation


def main() -> None:
    """Make what is missing: all methods at the first density, then at the next."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, only=tuple(METHODS), precision="32-true")
    parser.add_argument("--teacher_examples", default=12000, type=int)
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    options = parser.parse_args()
    data, held_out = common.hold_out(options, rows=2000)

    def dense() -> Path:
        words = common.shared(options, "sst2", data, options.teacher_examples)
        return common.dense_net(options, "teacher", *words, epochs=2, rate=5e-5)

    for density, rate, name in ((d, r, n) for d in options.densities for r in RATES for n in options.only):
        method, stages, words = METHODS[name]
        rates = [word for stage in stages for word in (f"--model.{stage}.learning_rate", rate)]
        common.fit(
            options, f"{name}-{density:g}-{rate:g}", *common.shared(options, "sst2", data, EXAMPLES),
            "--model", method, "--model.density", density, *words, *rates, *([] if name in OWN else TAUGHT),
            teacher=dense,
            more=lambda made, name=name, density=density, rate=rate: {
                "case": name, "target": density, "rate": rate,
                "held_out": common.metrics_on(made, held_out, options.threads),
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
