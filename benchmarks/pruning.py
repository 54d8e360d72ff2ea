"""LoSparse beside the prunings and low-rank nets of its tables: same dense net, same updates, same densities.

    python benchmarks/pruning.py --backbone DIR --data GLUE_DIR [--work DIR] [--threads 1] [--tasks sst2 mrpc rte]

Every method starts from the fine-tuned net and is trained as long. Its learning rate is the better of two on SST-2 at
density 0.20, where both are run. Writes benchmarks/results/pruning/<task>-<method>-<density>-<rate>-<seed>.json;
existing ones are kept, so the script can be stopped and started again. `python benchmarks/tables.py` makes the table.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path
from typing import Any

from common import RESULTS, command, dense_net, load, report_of, write

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


def ranks_of(net: Path, out: Path, source: list[object], threads: int) -> list[dict[str, Any]]:
    """Return the numerical ranks of the matrices of ``net``, as `analyze ranks` writes them."""
    command("analyze", "ranks", net, out, *source, threads=threads)
    with (out / "ranks.csv").open() as file:
        return list(csv.DictReader(file))


def better_rate(method: str) -> float:
    """Return the learning rate with which ``method`` did better on SST-2 at the larger density."""
    found = {}
    for result in load("pruning"):
        if (result["task"], result["case"], result["density"]) == ("sst2", method, DENSITIES[0]):
            found[result["rate"]] = result["records"][-1]["metric"]["val/accuracy"]
    return max(RATES, key=lambda rate: found[rate])


def main() -> None:
    """Make what is missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--work", default="runs/pruning", type=Path)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()

    def common(task: str) -> list[object]:
        source = ["--data.task", task, "--data.path", options.data / task]
        return [*source, "--trainer.precision", options.precision, "--trainer.enable_progress_bar", "false"]

    def dense(task: str) -> Path:
        many = DENSE_EXAMPLES.get(task)
        return dense_net(
            options.work / f"dense-{task}", "--model.backbone", options.backbone, *common(task),
            *(["--data.train_examples", many] if many else []), epochs=TASKS[task][0], rate=DENSE_RATE,
            threads=options.threads,
        )  # fmt: skip

    def run(task: str, method: str, density: float, rate: float, seed: int) -> None:
        name = f"{task}-{method}-{density:g}-{rate:g}-{seed}"
        if (RESULTS / "pruning" / f"{name}.json").exists():
            return
        (kind, stage, extra), (_, epochs, examples, _) = METHODS[method], TASKS[task]
        ramp = ["--model.prune.start", START[task], "--model.prune.end", 0.3] if stage == "prune" else []
        folder = options.work / name
        command(
            "fit", "--model", kind, "--model.density", density, "--model.backbone", options.backbone,
            "--model.teacher", dense(task), *common(task), *(["--data.train_examples", examples] if examples else []),
            f"--model.{stage}.epochs", epochs, f"--model.{stage}.learning_rate", rate,
            f"--model.{stage}.init", "finetuned", *ramp, "--model.distillation.alpha", 0, *extra,
            "--seed_everything", seed, "--run_dir", folder, "--ckpt_path", "last", threads=options.threads,
        )  # fmt: skip
        result = {"task": task, "case": method, "density": density, "rate": rate, "seed": seed, **report_of(folder)}
        if method in ("first_order", "magnitude") and seed == 1:  # LPAF's Figure 2
            source = ["--data.task", task, "--data.path", options.data / task]
            for tag, net in (("ranks", folder / "prune" / "net"), ("dense_ranks", dense(task))):
                result[tag] = ranks_of(net, folder / tag, source, options.threads)
        write("pruning", name, result)
        shutil.rmtree(folder)

    for method in options.methods:
        for rate in RATES:
            run("sst2", method, DENSITIES[0], rate, 1)
    for seed in options.seeds:
        for task in options.tasks:
            for density in DENSITIES:
                for method in options.methods:
                    if seed in TASKS[task][3]:
                        run(task, method, density, better_rate(method), seed)


if __name__ == "__main__":
    main()
