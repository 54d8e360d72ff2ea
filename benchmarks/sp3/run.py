"""SP3's claims on MiniLM: PCA against identity projections and CoFi, calibration tokens, presets.

    python -m benchmarks.sp3.run --backbone DIR --data GLUE_DIR [--teachers DIR] [--work DIR] [--tasks sst2]

``--teachers``: the dense nets of SST-2 and MRPC that stand behind the results are those in the --work of
benchmarks.cofi.run. Writes benchmarks/sp3/results/<task>-<cell>-<seed>.json; existing ones are kept, so the script can
be stopped and started again. `python -m benchmarks.tables` makes tables and figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.cofi.run import rates
from lit_compress.analysis.widths import width_table
from lit_compress.models.storage import load_net

STUDY = "sp3"
# Epochs of the dense net, of pruning (CoFi trains half as long again when it is cut, in the paper as long), examples:
# 624 to 1,000 updates of pruning. In half of them gates do not arrive, and the exact budget cuts what they left open.
TASKS = {"stsb": (3, 4, 3668), "mrpc": (5, 4, None), "rte": (5, 4, None), "sst2": (2, 4, 4000)}
BATCH = 16
SMALL = ("rte", "mrpc", "stsb")
RATE = 1e-4
SEEDS = (1, 2, 3)  # the second and third where a cell has them
HIDDEN = ("hidden",)
DIMENSIONS = ("hidden", "qk", "vo", "neurons")


@dataclass(frozen=True)
class Cell:
    """One run: what differs from the method's defaults."""

    name: str
    method: str
    density: float
    options: tuple[object, ...] = ()


def gates(*names: str) -> tuple[str, ...]:
    """Return the option that names the gates."""
    return ("--model.prune.gates", f"[{','.join(names)}]")


IDENTITY = ("--model.prune.projections", "identity")
# of gates, for some hundred updates where the paper has thousands
GATED: dict[str, list[object]] = {
    "SP3": [
        "--model.prune.log_alpha", 5, "--model.prune.gate_learning_rate", 0.2, "--model.prune.start", 0.02,
        "--model.prune.structure_start", 0.02, "--model.prune.multiplier_learning_rate", 0.2,
        "--model.prune.target_warmup", 0.5,
    ],
    "CoFi": [  # as in CoFi's study
        "--model.prune.init", "finetuned", *rates(""), "--model.prune.target_warmup", 0.4,
    ],
}  # fmt: skip
CELLS = [
    cell
    for density, label, own in ((0.12, "0.12", ()), (0.06, "0.06", ()), (0.29, "hidden-0.29", gates(*HIDDEN)))
    for cell in (
        Cell(f"pca-{label}", "SP3", density, own),
        Cell(f"identity-{label}", "SP3", density, (*own, *IDENTITY)),
    )
]
CELLS += [
    Cell("cofi-hidden-0.29", "CoFi", 0.29, gates(*HIDDEN)),
    Cell("cofi-0.12", "CoFi", 0.12),
    Cell("cofi-0.06", "CoFi", 0.06),
]
# only on the first task: the paper's Table 3, dimensions only; the program's way; the slower pair of rates of CoFi's
# study where CoFi does worst; the paper's Table 4, tokens
ONCE = [
    Cell("pca-dimensions-0.12", "SP3", 0.12, gates(*DIMENSIONS)),
    Cell("identity-dimensions-0.12", "SP3", 0.12, (*gates(*DIMENSIONS), *IDENTITY)),
    Cell("official-0.06", "SP3", 0.06, ("--model.fidelity", "official")),
    Cell("cofi-hidden-slow-0.29", "CoFi", 0.29, (*gates(*HIDDEN), *rates("-slow"))),
    *(Cell(f"tokens-{n}-0.06", "SP3", 0.06, ("--model.prune.tokens", n)) for n in (2048, 8192)),
]


def setting(options: Any, task: str) -> list[object]:
    """Return the options that all runs of a task share, also that of its dense net."""
    return common.shared(options, task, options.data / task, options.examples or TASKS[task][2])


def dense(options: Any, task: str) -> Path:
    """Return the fine-tuned net of a task."""
    return common.dense_net(options, task, *setting(options, task), epochs=TASKS[task][0], rate=RATE)


def train(options: Any, task: str, cell: Cell, seed: int) -> None:
    """Run one cell with one seed."""
    epochs = options.epochs or TASKS[task][1]
    stages = {"prune": epochs} | ({} if cell.method == "SP3" else {"retrain": max(1, epochs // 2)})
    trained: list[object] = []
    for stage, count in stages.items():
        trained += [f"--model.{stage}.epochs", count, f"--model.{stage}.learning_rate", RATE]

    def more(run: Path) -> dict[str, Any]:
        return {
            "cell": cell.name, "seed": seed, "expected": common.last_scalar(run, "train/density"),
            "widths": width_table(load_net(run / "export")) if cell.method == "SP3" else None,
        }  # fmt: skip

    common.fit(
        options, f"{task}-{cell.name}-{seed}", "--model", cell.method, "--model.density", cell.density,
        *setting(options, task), *trained, *GATED[cell.method], *cell.options, "--data.batch_size", BATCH,
        "--trainer.gradient_clip_val", 1.0, "--seed_everything", seed,
        teacher=partial(dense, options, task), more=more,
    )  # fmt: skip


def main() -> None:
    """Make what is missing."""
    names = tuple(cell.name for cell in (*CELLS, *ONCE))
    options = common.parser(
        STUDY, __doc__, *common.TRAINED, "examples", "epochs", tasks=tuple(TASKS), only=names, seeds=SEEDS
    ).parse_args()
    for task in options.tasks:
        for cell in [*CELLS, *(ONCE if task == next(iter(TASKS)) else [])]:
            several = task in SMALL and cell in CELLS and cell.density != 0.12
            for seed in SEEDS if several else SEEDS[:1]:
                if cell.name in options.only and seed in options.seeds:
                    train(options, task, cell, seed)


if __name__ == "__main__":
    main()
