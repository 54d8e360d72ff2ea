"""The tables of second-order compression, without training and with it, from results/*.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import Cell, file_density, load, origin, percent, table
from benchmarks.gains import with_gains
from benchmarks.second_order import untrained_tables

STUDY = "second_order"
REPLACED = "--config compare_sst2.yaml"
TITLE = "Second-order compression"
ABOUT = "Weightings, allocations and what is removed, from one teacher on SST-2: right after `factorize`, and trained."
KEY = "val/accuracy"

HEAD = """## Right after the factorization: MiniLM-L6-H384 on SST-2

Accuracy in % on the dev set (872 sentences, a standard error about 1.2) / on 2,000 held-out training phrases (0.7). The teacher
has {dense} on the dev set after 2 epochs of 12,000 phrases. Calibration on 1,024 training phrases, one seed. No training after it.
"""

ABLATION = """### One choice changed, at density 0.16
"""

EXPORTS = """### What the exports are

Estimate: what the compression adds to the loss of an example by the second-order estimate. FLOPs and time are those of the
dense model / the export's, one text, one thread. Seconds and memory are of the whole command, evaluation and export included.
"""

WHOLE = """### Of the whole model, by `--scope all` of version 0.2

The density is of all weights; the table of token embeddings (52 % of them) is factorized in the same queue. Bytes: of the file,
of dense. Rank: of the table, of 384.
"""

DIVERGENCE = """### Estimated and measured loss

Every cell with an estimate: what the compression adds to the loss of an example by the estimate, and as measured: the mean KL
from the dense model on 512 dev rows. ![figure](figures/divergence.png)
"""

TRAINED = """## After 1,000 steps, compared with LPAF and SVD

One teacher, batches of 32, distillation of logits with alpha 0.5; "hidden states" adds them with the default weight. LPAF spends
half of the steps on pruning ([study](../lpaf_vs_svd/README.md)). Dev / held-out accuracy; before training in brackets.
"""

TAUGHT = """## The same training for all methods

One teacher; 1,000 steps after it, those of pruning included, batches of 32; labels, the teacher's logits and its hidden states
(relative to their variance) with the same weights, but CoFi and SP3, which have their own; the same learning rates tried. Dev /
held-out accuracy; dev accuracy before training in brackets. Empty: not run yet. Published: LPAF's Table 2, dev accuracy of
BERT-base trained to its end, at 0.25 and (next to 0.17) at 0.16.
"""

TAUGHT_MRPC = """### The same on MRPC

A teacher of 5 epochs of 3,200 pairs with {dense}, 400 steps after it. Accuracy on the dev set (408 pairs, a standard error about
2.2) / on 468 held-out training pairs (2.1).
"""

ON_TASKS = """### The same on other tasks

One teacher per task, of 3 to 5 epochs, of QNLI on 3,000, of CoNLL-2003 on 5,000, of SQuAD on 2,500 training rows; calibration on
1,024 training examples, one seed, no training after it. The metric in % on the dev set. {rows}.
"""

AT_DENSITIES = """### Half, a quarter and a tenth

Teachers of their own in float32 (`--only kfac --densities 0.5 0.25 0.1 --precision 32-true`), as many epochs and rows as above. MRPC's teacher was
trained by `fit --model SVD --model.density 1 --data.hold_out 400 --model.dense.epochs 5 --model.dense.learning_rate 1e-4` and given by `--teachers`. The metric in % on the dev set. {rows}.
"""
OF_TASKS = {"tasks": ON_TASKS, "densities": AT_DENSITIES}

NAMES = {
    "kfac": "K-FAC",
    "kfac-exact": "K-FAC, exact labels",
    "structures": "K-FAC, heads and neurons",
    "inputs": "inputs, the same share for all",
    "inputs-global": "inputs, one budget",
    "fisher-both": "Fisher, both",
    "fisher-in": "Fisher, in (FWSVD)",
    "none": "none (SVD)",
}
REMOVED = {"kfac": "components", "both": "components, heads, neurons", "structures": "heads, neurons",
           "whole": "components, embeddings"}  # fmt: skip
ABLATIONS = {
    "kfac": "drawn labels",
    "kfac-exact": "exact labels",
    "kfac-true": "true labels",
    "kfac-refit": "refit",
    "inputs-global": "inputs only",
    "kfac-examples-64": "64 examples",
    "kfac-examples-256": "256 examples",
    "kfac-examples-4096": "4,096 examples",
    "kfac-seed-1": "calibration seed 1",
    "kfac-seed-2": "calibration seed 2",
    "kfac-seed-3": "calibration seed 3",
    "kfac-seed-4": "calibration seed 4",
}


def both(result: dict[str, Any]) -> str:
    """Return dev and held-out accuracy."""
    return f"{percent(result['compressed']['metric'])} / {percent(result['held_out'][KEY])}"


def sections() -> Iterator[str]:
    """Yield the tables, if there are results."""
    results = with_gains(load(STUDY))
    found = {(r["cell"], r["target"]): r for r in results if not r["cell"].startswith(("trained", "whole"))}
    if not found:
        return
    first = next(iter(found.values()))
    yield HEAD.format(dense=percent(first["dense"]["metric"]))
    densities = sorted({target for _, target in found}, reverse=True)
    rows = []
    for cell, name in NAMES.items():
        if any((cell, target) in found for target in densities):
            rows.append([name, *(both(found[cell, t]) if (cell, t) in found else "" for t in densities)])
    yield table(["weighting", *(f"{target:g}" for target in densities)], rows)
    shown = [
        [name, both(found[c, 0.16]), estimate(found[c, 0.16])] for c, name in ABLATIONS.items() if (c, 0.16) in found
    ]
    if len(shown) > 1:
        yield ABLATION
        yield table(["choice", "accuracy", "estimate"], shown)
    yield from on_tasks()
    yield from untrained_tables.untrained()
    yield from untrained_tables.estimates()
    yield EXPORTS
    rows = []
    for cell in ("kfac", "structures"):
        for target in densities:
            if result := found.get((cell, target)):
                ratios = result["ratios"]
                rows.append(
                    [
                        NAMES[cell], f"{file_density(result):.3f}", percent(result["compressed"]["metric"]),
                        estimate(result), f"{1 / ratios['flops']:.2f}x", str(result["gain"]),
                        f"{ratios['bytes']:.3f}", f"{result['seconds']:.0f}", f"{result['memory_mib']:,.0f} MiB",
                    ]
                )  # fmt: skip
    header = ["removed by", "density", "accuracy", "estimate", "FLOPs", "time", "bytes", "seconds", "memory"]
    yield table(header, rows)
    yield origin(first, STUDY, first["threads"])
    if whole := [r for r in results if r["cell"] == "whole"]:
        yield WHOLE
        yield table(
            ["density", "accuracy", "of the blocks", "rank", "bytes", "FLOPs", "time"],
            [
                [
                    f"{r['target']:g}", both(r), f"{file_density(r):.3f}", str(r["table_rank"]), f"{r['ratios']['bytes']:.3f}",
                    f"{1 / r['ratios']['flops']:.2f}x", str(r["gain"]),
                ]
                for r in sorted(whole, key=lambda r: -r["target"])
            ],
        )  # fmt: skip
    for made in load(f"{STUDY}/divergence"):
        yield DIVERGENCE
        cells = sorted(made["cells"].values(), key=lambda cell: cell["estimated"])
        yield table(
            ["removed by", "density", "estimated", "measured", "accuracy"],
            [
                [cell["cell"], f"{cell['target']:g}", f"{cell['estimated']:.4f}", f"{cell['measured']:.4f}", percent(cell["metric"])]
                for cell in cells
            ],
        )  # fmt: skip
        yield origin(made, f"{STUDY}/divergence", made["threads"])
    if trained := [r for r in results if r["cell"].startswith("trained")]:
        yield TRAINED
        yield table(["density", "method", "rate 3e-4", "rate 1e-4"], list(trained_rows(trained)))
    yield from taught()


def on_tasks() -> Iterator[str]:
    """Yield the tables on other tasks, without training: of the weightings, and of three densities."""
    for folder, head in OF_TASKS.items():
        yield from _on_tasks(folder, head)


def _on_tasks(folder: str, head: str) -> Iterator[str]:
    found: dict[str, dict[tuple[str, float], dict[str, Any]]] = {}
    for result in load(f"{STUDY}/{folder}"):
        found.setdefault(result["task"], {})[result["cell"], result["target"]] = result
    if not found:
        return
    some = {task: next(iter(cells.values())) for task, cells in found.items()}
    yield head.format(rows="; ".join(f"{task}: {r['metric']['rows']:,} rows" for task, r in some.items()))
    densities = sorted({target for cells in found.values() for _, target in cells}, reverse=True)
    rows = []
    for task, cells in found.items():
        rows.append([task, some[task]["metric"]["name"], f"dense: {percent(some[task]['dense']['metric'])}"])
        rows[-1] += [""] * len(densities)
        for cell, name in NAMES.items():
            if any(which == cell for which, _ in cells):
                shown = (cells.get((cell, target)) for target in densities)
                rows.append(["", "", name, *(percent(r["compressed"]["metric"]) if r else "" for r in shown)])
    yield table(["task", "metric", "weighting", *(f"{target:g}" for target in densities)], rows)
    yield origin(next(iter(some.values())), f"{STUDY}/tasks", 1)


METHODS = {
    "second_order": "SecondOrder",
    "structures": "SecondOrder, heads and neurons",
    "staged": "SecondOrder, in stages",
    "staged-0": "SecondOrder, in stages, no training",
    "lpaf": "LPAF",
    "lpaf-kfac": "LPAF, factorized under K-FAC",
    "fwsvd": "FWSVD",
    "fwsvd-both": "FWSVD, both axes",
    "svd": "SVD",
    "losparse": "LoSparse",
    "losparse-kfac": "LoSparse, factors from K-FAC",
    "itp": "ITP",
    "cofi": "CoFi",
    "sp3": "SP3",
    "flop": "FLOP",
    "block_movement": "Block movement",
    "theseus": "BERT-of-Theseus",
}
# LPAF's Table 2, BERT-base: at 0.25 and 0.16 of SST-2, then of MRPC
PUBLISHED: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "lpaf": ((90.7, 89.7), (86.5, 86.0)),
    "svd": ((88.9, 85.3), (70.1, 70.0)),
    "cofi": ((89.7, 89.2), (84.3, 83.6)),
    "flop": ((89.7, 89.4), (80.1, 78.4)),
    "block_movement": ((89.8, 89.2), (83.8, 81.1)),
    "theseus": ((88.5, 86.1), (77.2, 72.8)),
}


def taught() -> Iterator[str]:
    """Yield the tables of all methods after the same training, of SST-2 and of MRPC."""
    for task, (script, head) in enumerate(((f"{STUDY}/trained", TAUGHT), (f"{STUDY}/trained/mrpc", TAUGHT_MRPC))):
        found = {r["file"]: r for r in load(script)}
        if not found:
            continue
        some = next(iter(found.values()))
        yield head.format(dense=percent(some["dense"]["metric"]))
        rows = []
        for density in sorted({r["target"] for r in found.values()}, reverse=True):
            for case, name in METHODS.items():
                cells = [found.get(f"{case}-{density:.2g}-{rate}") for rate in ("0.0003", "0.0001")]
                if any(cells):
                    at = {"0.25": 0, "0.17": 1}.get(f"{density:.2g}")
                    there = "" if at is None or case not in PUBLISHED else str(PUBLISHED[case][task][at])
                    rows.append([f"{density:.2g}", name, *(after(cell) if cell else "" for cell in cells), there])
        yield table(["density", "method", "rate 3e-4", "rate 1e-4", "published"], rows)
        yield origin(some, f"{STUDY}/trained", 1, REPLACED)


def trained_rows(trained: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row per density and method, with a column per learning rate."""
    beside = {r["file"]: r for r in load("lpaf_vs_svd")}
    mine = {r["file"]: r for r in trained}
    for density in sorted({r["target"] for r in trained}, reverse=True):
        for label, name, source in (
            ("SVD", "svd", beside), ("LPAF", "lpaf", beside), ("SecondOrder, logits", "trained-logits", mine),
            ("SecondOrder, hidden states", "trained-hidden", mine),
        ):  # fmt: skip
            cells = [source.get(f"{name}-{density}-{rate}") for rate in ("0.0003", "0.0001")]
            if any(cells):
                yield [f"{density:g}", label, *(after(cell) if cell else "" for cell in cells)]


def after(result: dict[str, Any]) -> str:
    """Return dev and held-out accuracy after training, and dev accuracy before it."""
    return f"{both(result)} ({percent(result['compressed']['initial'])})"


def estimate(result: dict[str, Any]) -> str:
    """Return the estimated loss of a K-FAC cell."""
    value = (result.get("calibration") or {}).get("estimated_loss")
    return "" if value is None else f"{value:.3f}"


def figures() -> Iterator[tuple[str, Any]]:
    """Yield name and figure of the estimated and the measured loss."""
    from matplotlib.figure import Figure

    for made in load(f"{STUDY}/divergence"):
        figure = Figure(figsize=(6.4, 4.8), layout="constrained", dpi=100)
        axes, cells = figure.subplots(), list(made["cells"].values())
        others = [cell for cell in cells if cell["cell"] not in REMOVED]
        groups = {name: [c for c in cells if c["cell"] == cell] for cell, name in REMOVED.items()}
        for name, group in {**groups, "one choice changed": others}.items():
            axes.plot([c["estimated"] for c in group], [c["measured"] for c in group], "o", markersize=5, label=name)
        ends = [min(c["estimated"] for c in cells), max(c["measured"] for c in cells)]
        axes.plot(ends, ends, color="grey", linewidth=0.8, label="equal")
        axes.set(xscale="log", yscale="log", xlabel="estimated loss", ylabel="measured loss: KL from the dense model")
        axes.grid(alpha=0.3)
        axes.legend()
        yield "divergence", figure


def overview() -> Iterator[Cell]:
    """Yield the default at every density, without training, and trained at the rate that is best on held-out rows."""
    for result in load(STUDY):
        if result["cell"] == "kfac" and result["target"] < 0.5:
            yield Cell("SecondOrder, no training", [result], [result["compressed"]["metric"]])
    runs = [r for r in load(STUDY) if r["cell"] == "trained-hidden"]
    for result in load(f"{STUDY}/trained"):
        if result["case"] == "second_order":
            runs.append(result)
    for density in sorted({r["target"] for r in runs}):
        best = max((r for r in runs if r["target"] == density), key=lambda r: r["held_out"][KEY])
        yield Cell("SecondOrder", [best], [best["compressed"]["metric"]])
