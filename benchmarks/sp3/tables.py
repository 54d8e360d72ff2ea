"""The tables and figures of SP3's claims, from results/."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

from benchmarks.common import Cell, file_density, load, origin, percent, spread, table, updates

STUDY = "sp3"
REPLACED = "--config compare_stsb.yaml --methods SP3 CoFi --budgets 0.12 0.06"
TITLE = "SP3: PCA projections"
ABOUT = "SP3 next to identity projections and CoFi on four tasks at 0.29, 0.12 and 0.06; shared bases on a small Llama; calibration, step and forward in time."

TASKS = {"sst2": "SST-2", "rte": "RTE", "stsb": "STS-B", "mrpc": "MRPC"}
NOISE = {"sst2": 1.3, "rte": 3.0, "stsb": 0.9, "mrpc": 2.2}  # standard error of a dev metric, points
# The paper's Tables 1 and 2: BERT-base dense; SP3 and CoFi at 5 M (6 %); both with hidden dimensions only at 25 M.
PAPER = {
    "sst2": (93.1, 91.4, 90.6, 91.1, 86.9), "rte": (70.4, 66.4, 64.7, 66.8, 56.7),
    "stsb": (89.1, 86.1, 83.1, 86.8, 82.3), "mrpc": (85.6, 82.8, 82.6, 85.0, 71.8),
}  # fmt: skip
# Table 3, 10 M, dimensions only: with and without PCA; Table 4: 2,048, 4,096 and 8,192 tokens at 5 M
PAPER_PCA = {"sst2": (91.3, 91.2), "rte": (66.8, 52.7), "stsb": (87.8, 85.0), "mrpc": (85.5, 80.6)}
PAPER_TOKENS = {
    "sst2": (90.0, 91.4, 90.8), "rte": (58.8, 64.2, 63.5), "stsb": (85.9, 86.1, 86.4), "mrpc": (82.8, 82.8, 83.1),
}  # fmt: skip
CELLS = {
    "pca-0.12": "SP3, 12 %", "identity-0.12": "identity, 12 %", "cofi-0.12": "CoFi, 12 %",
    "pca-dimensions-0.12": "SP3, dimensions, 12 %", "identity-dimensions-0.12": "identity, dimensions, 12 %",
    "pca-0.06": "SP3, 6 %", "identity-0.06": "identity, 6 %", "cofi-0.06": "CoFi, 6 %",
    "official-0.06": "SP3 `official`, 6 %", "tokens-2048-0.06": "SP3, 2,048 tokens, 6 %",
    "tokens-8192-0.06": "SP3, 8,192 tokens, 6 %", "pca-hidden-0.29": "SP3, hidden, 29 %",
    "identity-hidden-0.29": "identity, hidden, 29 %", "cofi-hidden-0.29": "CoFi, hidden, 29 %",
    "cofi-hidden-slow-0.29": "CoFi with slower gates, hidden, 29 %",
}  # fmt: skip

TEXT = """## SP3: PCA against identity projections and CoFi

Dev metric in % (accuracy; STS-B mean of both correlations) of MiniLM-L6-H384, whose dense model is the teacher in every
cell. In parentheses: density of the exported file, and the density that the gates expected at the end of pruning. Where
the latter is far higher, the gates had not reached the target, and the exact budget closed open units too. (The best
epoch is exported, in some cells an earlier one.) Mean and standard deviation where there are several seeds. The paper's
numbers: BERT-base, full training data, 20 epochs; Spearman on STS-B. An earlier version had identity projections and
gates of some kinds alone.
"""


# Table 9, TinyLlama at 0.85 B, hidden states only: ARC-e, HellaSwag, PIQA
PAPER_GROUPS = {1: "38.5 / 30.0 / 57.9", 2: "42.0 / 31.7 / 60.2", 4: "44.2 / 33.0 / 61.5", 8: "46.0 / 33.6 / 62.0"}
DECODERS = """## SP3 on a decoder: sub-layers that share a basis

A Llama of 6 layers, 256 wide, with random weights, trained on 1 MB of plays; then pruned to a density of 75 % (matrices
between the bases count) by gates of hidden states, or also of neurons, in 4 epochs without a teacher. Perplexity per
token of the validation text; `between`: share of these matrices in the weights left. The paper has accuracies of
TinyLlama. An earlier version had shared bases, identity bases, and gates of hidden states alone. Its script,
`benchmarks/sp3/decoders.py`, is in the commits that the JSONs name, and each JSON holds its run's config.
"""


def cells() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return task -> cell -> its runs."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for result in load(STUDY):
        if "cell" in result:
            found.setdefault(result["task"], {}).setdefault(result["cell"], []).append(result)
    return found


def value(runs: list[dict[str, Any]] | None) -> float | None:
    """Return the mean metric of a cell."""
    return mean(run["compressed"]["metric"] for run in runs) if runs else None


def shown(runs: list[dict[str, Any]] | None) -> str:
    """Return metric, counted and expected density of a cell."""
    if not runs:
        return ""
    metrics = [run["compressed"]["metric"] for run in runs]
    error = f" ± {percent(stdev(metrics))}" if len(metrics) > 1 else ""
    density = mean(map(file_density, runs))
    expected = mean(run["expected"] for run in runs)
    return f"{percent(mean(metrics))}{error} ({percent(density)}, {percent(expected)} %)"


def costs(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the table of the exports' time, FLOPs and bytes, relative to the dense model, over tasks and seeds."""

    def ratios(cell: str, name: str) -> list[float]:
        return [run["ratios"][name] for runs in found.values() for run in runs.get(cell, [])]

    rows = [
        [
            label,
            " - ".join(dict.fromkeys(f"{end(times):.1f}" for end in (min, max))),
            *(percent(mean(ratios(cell, n))) for n in ("flops", "bytes")),
            " - ".join(dict.fromkeys(str(end(made)) for end in (min, max))),
        ]
        for cell, label in CELLS.items()
        if (times := ratios(cell, "speedup"))
        and (made := [updates(run) for runs in found.values() for run in runs.get(cell, [])])
    ]
    return table(
        ["export", "CPU speed-up, one text, all tasks and seeds", "FLOPs, % of dense", "bytes, % of dense",
         "steps after the teacher"],
        rows,
    )  # fmt: skip


def overview() -> Iterator[Cell]:
    """Yield the SST-2 runs of SP3 and of CoFi."""
    found = cells().get("sst2", {})
    for kind, name in (("pca", "SP3"), ("cofi", "CoFi")):
        for label in ("hidden-0.29", "0.12", "0.06"):
            runs = found.get(f"{kind}-{label}", [])
            yield Cell(name, runs, [run["compressed"]["metric"] for run in runs])


def claims(found: dict[str, dict[str, list[dict[str, Any]]]]) -> Iterator[str]:
    """Yield a line for every claim of the paper: whether it holds here."""
    for text, above, below in (
        ("PCA > identity at 12 %, dimensions only (Table 3)", "pca-dimensions-0.12", "identity-dimensions-0.12"),
        ("PCA > identity at 6 %", "pca-0.06", "identity-0.06"),
        ("PCA > identity for the hidden dimension at 29 %", "pca-hidden-0.29", "identity-hidden-0.29"),
        ("SP3 > CoFi for the hidden dimension at 29 % (Table 2)", "pca-hidden-0.29", "cofi-hidden-0.29"),
        ("SP3 > CoFi at 6 % (Table 1)", "pca-0.06", "cofi-0.06"),
        ("SP3 > CoFi at 12 %", "pca-0.12", "cofi-0.12"),
    ):
        pairs = {task: (value(runs.get(above)), value(runs.get(below))) for task, runs in found.items()}
        gaps = {task: 100 * (a - b) for task, (a, b) in pairs.items() if a is not None and b is not None}
        if gaps:
            words = ["within the noise" if abs(gap) <= NOISE[task] else "held" if gap > 0 else "not held"
                     for task, gap in gaps.items()]  # fmt: skip
            listed = ", ".join(
                f"{TASKS[task]} {gap:+.1f} {word}" for (task, gap), word in zip(gaps.items(), words, strict=True)
            )
            yield f"- {text}: {listed} (points; the noise is one standard error of the dev set)."
    kept = {
        TASKS[task]: score / runs["pca-0.06"][0]["dense"]["metric"]
        for task, runs in found.items()
        if (score := value(runs.get("pca-0.06"))) is not None
    }
    if kept:
        average = mean(kept.values())
        listed = ", ".join(f"{task} {percent(share)} %" for task, share in kept.items())
        yield f"- At least 96 % of dense kept at 6 %: {'held' if average >= 0.96 else 'not held'} ({listed})."


def speed() -> Iterator[str]:
    """Yield the lines on the time of calibration, a training step and a forward."""
    for r in load("sp3/speed"):
        match r.get("part"):
            case "calibration":
                yield (
                    f"- Calibration of BERT-base, {r['examples']} x {r['length']} tokens, {r['threads']} thread(s): "
                    f"{r['seconds']['all']:.0f} s (goal {r['goals']['calibration seconds']}), "
                    f"{r['mib_over_the_net']:.0f} MiB over a forward (goal 1024)."
                )
            case "step":
                yield f"- Step with gates / dense distillation step: {spread(r['ratio'])} (goal 1.6)."
            case "speed":
                yield (
                    f"- BERT-base at {percent(r['density'])} %, length 128, {r['threads']} thread(s), dense / SP3: "
                    f"batch 1 {r['batch 1']['ratio']:.2f}, batch 32 {r['batch 32']['ratio']:.2f} (goal 4)."
                )


WHERE = """## Where the time of an export goes

MiniLM-L6-H384 with random weights: SP3 with the widths of its model of SST-2 at 6 %, and a model of CoFi's form with as many weights;
one thread. Dense / small, median over rounds in which the models take turns; milliseconds of a forward per kind of operation (and how
many there are), under PyTorch's profiler. `with room`: the form of earlier exports, in which zeros made room for the next hidden state. `W_R`: share of
the matrices on the residual path in the weights.
"""


def where() -> Iterator[str]:
    """Yield the table of what an export of SP3 spends its time on."""
    results = load("sp3/where")
    if not results:
        return
    yield WHERE
    kinds = list(results[0]["nets"]["CoFi"]["kinds"])
    rows = []
    for r in results:
        dense = r["nets"]["dense"]
        for name, net in r["nets"].items():
            if net["kinds"] is None:
                continue
            shown = [f"{part['milliseconds']:.2f} ({part['operations']:.0f})" for part in net["kinds"].values()]
            rows.append([
                f"{r['batch']} x {r['length']}", name, f"{dense['flops'] / net['flops']:.1f}",
                f"{net['faster']['median']:.2f} ({net['faster']['low']:.2f} - {net['faster']['high']:.2f})",
                percent(net["residual_weights"] / net["weights"]) + " %", *shown,
            ])  # fmt: skip
    yield table(["texts x tokens", "model", "FLOPs", "time", "W_R", *(f"{kind}, ms" for kind in kinds)], rows)
    yield origin(results[0], "sp3/where", results[0]["threads"])


def decoders() -> Iterator[str]:
    """Yield the section on the small Llama."""
    found = {result["cell"]: result for result in load("sp3/decoders")}
    if not found:
        return
    first = next(iter(found.values()))
    yield DECODERS
    yield origin(first, "sp3/decoders", 1)
    rows = [["dense", "", f"{first['dense']['metric']:.2f}", "100.0", "", ""]]
    if longer := found.pop("longer", None):
        rows.append(["dense, 4 epochs longer", "", f"{longer['compressed']['metric']:.2f}", "100.0", "", ""])
    for cell, r in found.items():
        kind, *gates, group = cell.split("-")
        left = r["compressed"]["params"]["sites"]
        rows.append([
            {"pca": "PCA", "identity": "identity"}[kind] + (", neurons too" if gates else ""), group,
            f"{r['compressed']['metric']:.2f}", percent(r["compressed"]["density"]), percent(r["between"] / left),
            "" if gates or kind != "pca" else PAPER_GROUPS[int(group)],
        ])  # fmt: skip
    header = [
        "bases",
        "sub-layers that share one",
        "perplexity",
        "density, %",
        "between, %",
        "paper: ARC-e / HellaSwag / PIQA",
    ]
    yield table(header, rows)


def pictured(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Return the tasks in the figure."""
    return [task for task in TASKS if found.get(task, {}).get("pca-0.06")]


def figures() -> Iterator[tuple[str, Any]]:
    """Yield the figure of the fractions left in every layer at 6 % (the paper's Figures 4 and 6)."""
    from benchmarks.analysis.widths import width_figure

    found = cells()
    if tasks := pictured(found):
        yield "widths", width_figure({TASKS[task]: found[task]["pca-0.06"][0]["widths"] for task in tasks})


def sections() -> Iterator[str]:
    """Yield the sections of the page, if there are results."""
    results, found = load(STUDY), cells()
    if not results:
        return
    yield TEXT
    yield origin(results[0], STUDY, 1, REPLACED)
    if found:
        rows = [["dense", *(percent(next(iter(found[t].values()))[0]["dense"]["metric"]) for t in TASKS if t in found)]]
        rows += [
            [label, *(shown(found[task].get(cell)) for task in TASKS if task in found)]
            for cell, label in CELLS.items()
            if any(cell in runs for runs in found.values())
        ]
        for i, label in enumerate(("dense", "SP3, 6 %", "CoFi, 6 %", "SP3, hidden, 29 %", "CoFi, hidden, 29 %")):
            rows.append([f"paper: {label}", *(f"{PAPER[task][i]:.1f}" for task in TASKS if task in found)])
        for i, label in enumerate(("SP3", "without PCA")):
            rows.append([f"paper: {label}, dimensions, 12 %", *(f"{PAPER_PCA[t][i]:.1f}" for t in TASKS if t in found)])
        for i, label in enumerate(("2,048", "4,096", "8,192")):
            rows.append([f"paper: {label} tokens, 6 %", *(f"{PAPER_TOKENS[t][i]:.1f}" for t in TASKS if t in found)])
        yield table(["", *(TASKS[task] for task in TASKS if task in found)], rows)
        yield "\n".join(claims(found)) + "\n"
        yield costs(found)
        if pictured(found):
            yield "Fraction left per layer at 6 %: ![figure](figures/widths.png)\n"
    yield "\n".join(speed()) + "\n"
    yield from where()
    yield from decoders()
