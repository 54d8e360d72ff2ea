"""LoSparse beside the prunings and low-rank nets of its tables: same dense net, same updates, same densities.

    python -m benchmarks.pruning.run --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc rte]

Every method starts from the fine-tuned net and is trained as long. Its learning rate is the better of two on SST-2 at
density 0.20, where both are run. Writes benchmarks/pruning/results/<task>-<method>-<density>-<rate>-<seed>.json;
existing ones are kept, so the script can be stopped and started again. `python -m benchmarks.tables` makes the table.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

STUDY = "pruning"
# (epochs of the dense net, of the method, examples of the method, seeds): 250, 115 and 78 updates
TASKS = {"sst2": (2, 2, 4000, (1,)), "mrpc": (5, 1, None, (1, 2, 3)), "rte": (5, 1, None, (1, 2, 3))}
START = {"sst2": 0.1, "mrpc": 0.1, "rte": 0.15}  # of the updates: PLATON has its first scores after ten
DENSE_RATE, DENSE_EXAMPLES = 1e-4, {"sst2": 16000}
DENSITIES, RATES = (0.2, 0.1), (1e-4, 3e-4)
LAYERS = ["--model.distillation.alpha_layers", 15]  # b of most runs of the paper's Tables 12 and 13
METHODS: dict[str, tuple[str, str, list[object]]] = {  # class, its stage, what is not the default
    "losparse": ("LoSparse", "prune", []),
    "losparse-layers": ("LoSparse", "prune", LAYERS),
    "itp": ("ITP", "prune", []),
    "movement": ("Movement", "prune", []),
    "low_rank_1": ("LowRankI", "retrain", []),
    "low_rank_2": ("LowRankII", "prune", []),
    "platon": ("PLATON", "prune", []),
    "first_order": ("FirstOrder", "prune", []),
    "magnitude": ("Magnitude", "prune", []),
}


def dense(options: Any, task: str) -> Path:
    """Return the fine-tuned net of a task."""
    words = common.shared(options, task, options.data / task, DENSE_EXAMPLES.get(task))
    return common.dense_net(options, task, *words, epochs=TASKS[task][0], rate=DENSE_RATE)


def named(task: str, method: str, density: float, rate: float, seed: int) -> str:
    """Return the name of a result."""
    return f"{task}-{method}-{density:g}-{rate:g}-{seed}"


def better_rate(options: Any, method: str) -> float:
    """Return the rate with which ``method`` did better on SST-2 at the larger density; the first where none ran."""
    found = dict.fromkeys(RATES, 0.0)
    for rate in RATES:
        file = options.results / f"{named('sst2', method, DENSITIES[0], rate, 1)}.json"
        if file.exists():
            found[rate] = json.loads(file.read_text())["records"][-1]["metric"]["val/accuracy"]
    return max(RATES, key=lambda rate: found[rate])


def run(options: Any, task: str, method: str, density: float, rate: float, seed: int) -> None:
    """Train one method, and take the ranks of LPAF's Figure 2."""
    (kind, stage, extra), (_, epochs, examples, _) = METHODS[method], TASKS[task]
    ramp = ["--model.prune.start", START[task], "--model.prune.end", 0.3] if stage == "prune" else []
    name = named(task, method, density, rate, seed)

    def more(folder: Path) -> dict[str, Any]:
        result = {"task": task, "case": method, "density": density, "rate": rate, "seed": seed}
        if method in ("first_order", "magnitude") and seed == 1:
            for tag, net in (("ranks", folder / "prune" / "net"), ("dense_ranks", dense(options, task))):
                common.command(
                    options, "analyze", "ranks", net, folder / tag, *common.source(task, options.data / task)
                )
                result[tag] = common.rows_of(folder / tag / "ranks.csv")
        return result

    made = common.fit(
        options, name, "--model", kind, "--model.density", density,
        *common.shared(options, task, options.data / task, examples),
        f"--model.{stage}.epochs", epochs, f"--model.{stage}.learning_rate", rate, f"--model.{stage}.init", "finetuned",
        *ramp, "--model.distillation.alpha", 0, *extra, "--seed_everything", seed,
        teacher=partial(dense, options, task), more=more,
    )  # fmt: skip
    if made:
        shutil.rmtree(options.work / name)


def main() -> None:
    """Make what is missing, seed by seed."""
    options = common.parser(
        STUDY, __doc__, *common.TRAINED, tasks=tuple(TASKS), only=tuple(METHODS), seeds=(1, 2, 3)
    ).parse_args()
    for method in options.only:
        for rate in RATES:
            run(options, "sst2", method, DENSITIES[0], rate, 1)
    for seed in options.seeds:
        for task in options.tasks:
            for density in DENSITIES:
                for method in options.only:
                    if seed in TASKS[task][3]:
                        run(options, task, method, density, better_rate(options, method), seed)


if __name__ == "__main__":
    main()
