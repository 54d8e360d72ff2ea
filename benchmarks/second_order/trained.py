"""Methods after the same training from the same teacher: as many updates, the same distillation, the same search.

    python -m benchmarks.second_order.trained --backbone DIR --data DIR [--work DIR] [--teachers DIR] [--threads 1]
    python -m benchmarks.second_order.trained --task mrpc ...

One teacher per task. Of SST-2, 2,000 training rows are held out and choose each method's learning rate; every run makes
1,000 updates after the teacher, those of pruning included. Of MRPC 468 rows are held out, and a run makes 400 updates.
Labels, the teacher's logits and its hidden states teach all methods alike; CoFi and SP3 compare hidden states in their
own ways, and have their own weights. BERT-of-Theseus keeps whole blocks: one of six (0.17) in place of 0.25, none at
0.10, and learns from logits alone.

Writes benchmarks/second_order/results/trained/<method>-<density>-<rate>.json (a run's report.json, ``held_out``; of
MRPC in mrpc/); existing ones are kept, so the script can be stopped and started again. --data is the folder of the
task.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import common
from benchmarks.sp3.run import GATED

STUDY = "second_order/trained"
DENSITIES = (0.1, 0.25, 0.06, 0.16, 0.03)  # the most telling first
RATES = (3e-4, 1e-4)
EPOCHS = 4
# rows held out, examples of a run (None: all) and of the teacher, the teacher's epochs
TASKS: dict[str, tuple[int, int | None, int | None, int]] = {
    "sst2": (2000, 8000, 12000, 2), "mrpc": (468, None, None, 5),
}  # fmt: skip
TAUGHT = ["--model.distillation.alpha", 0.5, "--model.distillation.alpha_layers", 5,
          "--model.distillation.mask_padding", "true", "--model.distillation.relative", "true"]  # fmt: skip


def only(stage: str) -> list[object]:
    """Return the epochs of a method that has one stage after the teacher."""
    return [f"--model.{stage}.epochs", EPOCHS]


HALVES = ["--model.prune.epochs", EPOCHS // 2, "--model.retrain.epochs", EPOCHS // 2]
ROWS = [*only("prune"), "--model.prune.init", "finetuned", "--model.prune.start", 0.1, "--model.prune.end", 0.3]
# 13,824 gates, each of a small part of the size, need other rates than CoFi's: tried on training rows, not stored
RANK_GATES: list[object] = ["--model.prune.gate_learning_rate", 0.1, "--model.prune.multiplier_learning_rate", 1.0,
                            "--model.prune.target_warmup", 0.4]  # fmt: skip
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
    "staged": ("SecondOrder", ["retrain"], only("retrain")),
    "staged-0": ("SecondOrder", [], ["--model.retrain.epochs", 0]),
    "svd": ("SVD", ["retrain"], only("retrain")),
    "flop": ("FLOP", ["prune"], [*only("prune"), "--model.prune.init", "finetuned", *RANK_GATES]),
    "block_movement": ("BlockMovement", ["prune", "retrain"], [*HALVES, "--model.prune.init", "finetuned",
                                                               "--model.prune.start", 0.1, "--model.prune.end", 0.6]),
    "theseus": ("Theseus", ["replace"], only("replace")),
}  # fmt: skip
# distillation; a net of one block has no hidden states to compare
OWN: dict[str, list[object]] = {"cofi": [], "sp3": [], "theseus": TAUGHT[:2]}
WAY = (0.5, 0.25)  # densities on the way of the cells ``staged``
BLOCKS = {0.25: 1 / 6}  # density -> Theseus' in a net of six blocks; none of less


def main() -> None:
    """Make what is missing: all methods at the first density, then at the next."""
    parser = common.parser(STUDY, __doc__, *common.TRAINED, only=tuple(METHODS), precision="32-true")
    parser.add_argument("--task", choices=TASKS, default="sst2")
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    options = parser.parse_args()
    rows, examples, taught, epochs = TASKS[options.task]
    if options.task != "sst2":
        options.work, options.results = options.work / options.task, options.results / options.task
    data, held_out = common.hold_out(options, rows=rows)

    def dense() -> Path:
        words = common.shared(options, options.task, data, taught)
        return common.dense_net(options, "teacher", *words, epochs=epochs, rate=5e-5)

    def train(name: str, density: float, rate: float) -> None:
        method, stages, words = METHODS[name]
        if name.startswith("staged"):
            words = [*words, "--model.through", str([way for way in WAY if way > density])]
        rated = [word for stage in stages for word in (f"--model.{stage}.learning_rate", rate)]
        common.fit(
            options, f"{name}-{density:.2g}-{rate:g}", *common.shared(options, options.task, data, examples),
            "--model", method, "--model.density", density, *words, *rated, *OWN.get(name, TAUGHT),
            teacher=dense,
            more=lambda made: {
                "case": name, "target": density, "rate": rate,
                "held_out": common.metrics_on(made, held_out, options.threads),
            },
        )  # fmt: skip

    for density, rate, name in ((d, r, n) for d in options.densities for r in options.rates for n in options.only):
        if left := BLOCKS.get(density) if name == "theseus" else density:
            train(name, left, rate)


if __name__ == "__main__":
    main()
