"""The tables of CoFi: metric and speed compared with those of ITP and LoSparse, and the paper's claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Cell, file_density, held, load, origin, percent, spread, table, updates
from benchmarks.gains import with_gains

STUDY = "cofi"
REPLACED = '--config compare_mrpc.yaml --methods CoFi "CoFi x LoSparse" LoSparse ITP --budgets 0.4 0.2 0.1'
TITLE = "CoFi compared with ITP and LoSparse"
ABOUT = "CoFi and LoSparse inside CoFi compared with ITP and LoSparse on SST-2 and MRPC at 0.40, 0.20 and 0.10: metric, size, speed-up; the time of a gated step."

METHODS = {"CoFi": "CoFi", "CoFiLoSparse": "CoFi x LoSparse", "ITP": "ITP", "LoSparse": "LoSparse"}
GATE_RATES = ("gate_learning_rate", "multiplier_learning_rate")
FIRST = "0.3 / 0.03"  # pair of rates
HEAD = """## CoFi compared with ITP and LoSparse: MiniLM-L6-H384

Dev accuracy in %, one seed; same teacher, examples and number of steps after it for all (`steps`: of all stages),
all start from the fine-tuned model. `in the file`: density of the exported file. These runs
stored matrices with above 70 % of their parameters dense, as the package no longer does; they count whole.
CoFi learns from the teacher as in its paper (hidden states 0.9, logits 0.1, no labels), ITP and LoSparse from its
logits and from the labels, half each; `their loss` is CoFi with this loss. Speed-up: dense / export, CPU, one thread,
batch 32 and batch 1, at the task's length. FLOPs: dense / export. `rates`: learning rates of gates / multipliers.
`cut`: after the closed parts were removed, before the pruned model is retrained; ITP and LoSparse have no such stage.
"""
# Li et al. 2023, Table 7, BERT-base at 10 %: dense, CoFi, CoFi x LoSparse
PAPER = {"sst2": (92.43, 90.60, 91.51), "mrpc": (87.74, 84.07, 85.54)}


class Run:
    """One result."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result, self.task, self.method = result, result["task"], result["method"]
        self.asked = result["config"]["model"]["init_args"]["density"]
        self.found = file_density(result)
        self.metric = result["compressed"]["metric"]
        prune = result["config"]["model"]["init_args"]["prune"]
        self.share = prune.get("share") or 0.5  # of CoFi x LoSparse
        self.labels = result["config"]["model"]["init_args"]["distillation"].get("alpha_labels", 0) > 0  # of CoFi
        self.rates = " / ".join(f"{prune[name]:g}" for name in GATE_RATES if name in prune)
        self.flops = 1 / result["ratios"]["flops"]
        dense, export = (entry["median"] for entry in result["latency_batch_32"])
        self.speedup, self.single = dense / export, result["gain"]

    def row(self) -> list[str]:
        """Return the run's line."""
        last = self.result["records"][-1]
        cut = percent(last["initial"]["val/accuracy"]) if last["name"] == "retrain" else ""
        ratios = [*(f"{ratio:.2f}" for ratio in (self.flops, self.speedup)), str(self.single).rstrip("x")]
        label = METHODS[self.method]
        if self.method == "CoFiLoSparse":
            label += f", {self.asked / self.share:.2f} x {self.share:.2f}"
        label += ", their loss" * self.labels
        return [self.task, f"{self.asked:g}", label, self.rates, str(updates(self.result)), f"{self.found:.4f}", cut,
                f"**{percent(self.metric)}**", *ratios]  # fmt: skip


def sections() -> list[str]:
    """Return the sections that have results."""
    return [*comparison(), *steps()]


def comparison() -> list[str]:
    """Return the tables of the runs and of the claims."""
    runs = [Run(result) for result in with_gains(load(STUDY))]
    if not runs:
        return []
    runs.sort(key=lambda run: (run.task, -run.asked, list(METHODS).index(run.method), -run.share, run.rates))
    header = [
        "task",
        "density",
        "method",
        "rates",
        "steps",
        "in the file",
        "cut",
        "end",
        "FLOPs",
        "speed-up, 32",
        "speed-up, 1",
    ]
    dense = {run.task: percent(run.result["dense"]["metric"]) for run in runs}
    teachers = ", ".join(f"{metric} on {task}" for task, metric in sorted(dense.items()))
    return [
        HEAD, f"The teacher has {teachers}.\n", table(header, [run.row() for run in runs]), *claims(runs),
        origin(runs[0].result, STUDY, 1, REPLACED),
    ]  # fmt: skip


def overview() -> Iterator[Cell]:
    """Yield the SST-2 runs with the first pair of rates and the paper's loss and share."""
    runs = [Run(result) for result in with_gains(load(STUDY))]
    for method, name in METHODS.items():
        for run in runs:
            first = run.rates in ("", FIRST) and run.share == 0.5 and not run.labels
            if (run.task, run.method) == ("sst2", method) and first:
                yield Cell(name, [run.result], [run.metric])


def claims(runs: list[Run]) -> list[str]:
    """Return the table of the claims: the numbers, and whether each holds."""
    gated = [run for run in runs if run.method.startswith("CoFi")]
    if not gated:
        return []
    papers = [run for run in gated if not run.labels and run.share == 0.5]
    rows = []
    for method, label in METHODS.items():
        if misses := [abs(run.found / run.asked - 1) for run in runs if run.method == method]:
            text = f"{sum(miss <= 0.01 for miss in misses)} of {len(misses)}; largest miss {100 * max(misses):.2f} %"
            rows.append([f"{label}: the file has the target within 1 %", text, held(max(misses) <= 0.01)])
    for task, rates in sorted({(run.task, run.rates) for run in papers}):
        pair = {run.method: run.metric for run in papers if (run.task, run.rates, run.asked) == (task, rates, 0.1)}
        if len(pair) == 2:
            _, cofi, both = PAPER[task]
            text = f"{percent(pair['CoFiLoSparse'])} and {percent(pair['CoFi'])}; paper, BERT-base: {both} and {cofi}"
            claim = f"CoFi x LoSparse >= CoFi at 0.10, {task}, {rates}"
            rows.append([claim, text, held(pair["CoFiLoSparse"] >= pair["CoFi"])])
    for method in ("CoFi", "CoFiLoSparse"):
        if of_it := [run for run in gated if run.method == method]:
            least = min(of_it, key=lambda run: run.speedup / run.flops)
            text = f"least {least.speedup:.2f} of {least.flops:.2f} ({least.task}, {least.asked:g})"
            claim = f"{METHODS[method]}: speed-up at batch 32 >= 70 % of the FLOP ratio"
            rows.append([claim, text, held(least.speedup >= 0.7 * least.flops)])
    return ["Claims:\n", table(["claim", "measured", ""], rows)]


def steps() -> list[str]:
    """Return the table of the time of a training step with gates."""
    results = load("cofi/gated_step")
    rows = [[result["file"], spread(result["ratio"]), held(result["ratio"]["median"] <= 1.15)] for result in results]
    header = ["shape, device, precision", "gated / dense", "at most 1.15"]
    return ["Time of a training step with gates / the same step of the dense model, both with CoFi's distillation:\n",
            table(header, rows), origin(results[0], "cofi/gated_step", 1)] if results else []  # fmt: skip
