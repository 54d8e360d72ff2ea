"""The tables of LoSparse, its baselines and its claims, from results/*.json; of the time of pruning, from results/speed/."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.common import Cell, file_density, load, mean_and_deviation, origin, percent, spread, table, updates

STUDY = "pruning"
REPLACED = '--config compare_mrpc.yaml --methods LoSparse ITP Movement "Low-rank I" "Low-rank II" PLATON FirstOrder Magnitude --budgets 0.2 0.1'
TITLE = "LoSparse compared with its baselines"
ABOUT = "LoSparse, ITP, movement, low-rank, PLATON, first-order and magnitude pruning on SST-2, MRPC and RTE; the time that pruning adds to a step and that compact layers save."

TASKS = {"sst2": ("SST-2", "val/accuracy"), "mrpc": ("MRPC", "val/f1"), "rte": ("RTE", "val/accuracy")}
METHODS = {
    "losparse": "LoSparse", "losparse-layers": "LoSparse + layers", "itp": "ITP", "movement": "Movement",
    "low_rank_2": "Low-rank II", "low_rank_1": "Low-rank I", "platon": "PLATON *", "first_order": "first-order *",
    "magnitude": "magnitude *",
}  # fmt: skip
# Table 1 of the paper, DeBERTaV3-base, dense first; NA did not converge. MRPC as F1. Figure 5 has no numbers.
PAPER: dict[tuple[str, float], tuple[float, dict[str, float | str]]] = {
    ("sst2", 0.2): (95.3, {"losparse": 91.7, "itp": 90.8, "movement": 89.4}),
    ("sst2", 0.1): (95.3, {"losparse": 89.2, "itp": 88.3, "movement": 88.0}),
    ("mrpc", 0.2): (93.3, {"losparse": 89.4, "itp": 87.0, "movement": 85.0}),
    ("mrpc", 0.1): (93.3, {"losparse": 87.4, "itp": 84.3, "movement": 83.4}),
    ("rte", 0.2): (82.0, {"losparse": 68.0, "itp": "NA", "movement": 61.2}),
    ("rte", 0.1): (82.0, {"losparse": 66.0, "itp": "NA", "movement": "NA"}),
}
CLAIMS = [("losparse", "itp"), ("itp", "movement"), ("losparse", "low_rank_2"), ("low_rank_2", "low_rank_1"),
          ("losparse-layers", "losparse")]  # fmt: skip

HEAD = """## LoSparse compared with its baselines: MiniLM-L6-H384

Dev metric in % (SST-2, RTE accuracy; MRPC F1), mean ± standard deviation over the seeds that were run. Every method
starts from the same fine-tuned model and makes the same steps after it (SST-2: {sst2}; MRPC: {mrpc}; RTE: {rte}; batch
32, bf16-mixed), without logits distillation; densities fall between 10 % (RTE: 15 %) and 70 % of them. The learning
rate of a method is the better of 1e-4 and 3e-4 on SST-2 at 0.20. `paper`: Table 1 of Li et al., DeBERTaV3-base. Methods
with * remove single weights and store them as zeros.
"""

MACHINERY = """## Pruning while training: scores, selection, zeroing

Time of scores, selection and zeroing per optimizer step, mean over an interval of 10, in % of a dense fine-tuning step
of MiniLM-L6-H384 (32 x 128 tokens); goal: at most {goal}. `ramp`: while the density falls; `final`: at the final
density, where LoSparse and ITP select after every step. One thread.
"""

GAIN = """## Compact LoSparse layers: factors and kept rows against the dense matrix

One thread, 32 x 128 tokens, processor time, factors with 0.05 of the parameters, random rows. Share of ideal: speed-up x
density, in % (goal {goal}). `layers`: all matrices of the blocks; `net`: the whole forward, with attention, GELU and
LayerNorm, which do not change. BERT-base with 2 of its blocks.
"""

LIMIT = """Time of a single layer / of its dense matrix, by the share of parameters that it stores (earlier versions merged it above 0.7):
"""


def value(result: dict[str, Any]) -> float:
    """Return the dev metric of the compressed model."""
    return result["records"][-1]["metric"][TASKS[result["task"]][1]]


def cells_of(results: list[dict[str, Any]]) -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    """Group the runs by task, density and method, the better learning rate on SST-2 only."""
    cells: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for result in results:
        cells.setdefault((result["task"], result["density"], result["case"]), []).append(result)
    for (task, _, _), group in cells.items():
        if task == "sst2":
            group[:] = [max(group, key=value)]
    return cells


def comparison(cells: dict[tuple[str, float, str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table of metrics: one row per method, one column per task and density."""
    columns = [key for key in PAPER if any(found[:2] == key for found in cells)]
    rows = [["dense", ""]]
    for task, density in columns:
        first = next(group[0] for key, group in cells.items() if key[:2] == (task, density))
        rows[0] += [percent(first["records"][0]["metric"][TASKS[task][1]]), str(PAPER[task, density][0])]
    for method, title in METHODS.items():
        rates = {f"{r['rate']:g}" for key, group in cells.items() if key[2] == method for r in group}
        row = [title, ", ".join(sorted(rates))]
        for task, density in columns:
            group = cells.get((task, density, method), [])
            row += [
                mean_and_deviation([value(r) for r in group]) if group else "",
                str(PAPER[task, density][1].get(method, "")),
            ]
        rows.append(row)
    header = ["method", "rate"]
    for task, density in columns:
        seeds = max(len(group) for key, group in cells.items() if key[:2] == (task, density))
        header += [f"{TASKS[task][0]} {density:.2f}, {seeds} seed{'s' * (seeds > 1)}", "paper"]
    yield table(header, rows)


def densities(cells: dict[tuple[str, float, str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table of the files' densities, mean over the seeds; merged matrices count whole."""
    columns = [key for key in PAPER if any(found[:2] == key for found in cells)]
    rows = [
        [
            title,
            *(
                percent(mean(map(file_density, cells[*key, method]))) if (*key, method) in cells else ""
                for key in columns
            ),
        ]
        for method, title in METHODS.items()
    ]
    yield "**Density of the exported files**, % (methods with *: of weights that are not zero)\n"
    yield table(["method", *(f"{TASKS[task][0]} {density:.2f}" for task, density in columns)], rows)


def claims(cells: dict[tuple[str, float, str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table of differences of means, in points, for every order of methods that the paper states."""
    rows = []
    for better, worse in CLAIMS:
        row, found = [f"{METHODS[better]} > {METHODS[worse]}"], []
        for task, density in PAPER:
            pair = [cells.get((task, density, method), []) for method in (better, worse)]
            if all(pair):
                found.append(100 * (mean(map(value, pair[0])) - mean(map(value, pair[1]))))
            row.append(f"{found[-1]:+.1f}" if all(pair) else "")
        rows.append([*row, f"{sum(d > 0 for d in found)} of {len(found)}"])
    yield "**The paper's orders** (difference in points; positive: as the paper says)\n"
    yield table(["order", *(f"{TASKS[task][0]} {density:.2f}" for task, density in PAPER), "held"], rows)


def ranks(cells: dict[tuple[str, float, str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table of the average numerical rank of the pruned matrices, LPAF's Figure 2."""
    rows = []
    for (task, density, method), group in sorted(cells.items(), key=lambda item: (item[0][0], item[0][2], -item[0][1])):
        for result in group:
            if "ranks" in result:
                means = [mean(float(r["rank"]) for r in result[tag]) for tag in ("dense_ranks", "ranks")]
                rows.append([TASKS[task][0], METHODS[method], f"{density:.2f}", *(f"{m:.0f}" for m in means)])
    yield "**Average rank of the pruned matrices** (LPAF's Figure 2)\n"
    yield table(["task", "method", "density", "rank, dense", "rank, pruned"], rows)


def overview() -> Iterator[Cell]:
    """Yield every method's SST-2 runs, LoSparse without distillation of layers."""
    cells = cells_of(load(STUDY))
    for method, name in METHODS.items():
        for density in (0.2, 0.1) if method != "losparse-layers" else ():
            runs = cells.get(("sst2", density, method), [])
            yield Cell(name.removesuffix(" *"), runs, [value(run) for run in runs])


def machinery(result: dict[str, Any]) -> list[str]:
    """Return the table of each method's share of a step, and of the memory of its scores."""
    rows = []
    for method, state in result["state"].items():
        cells = [result["ratio"][f"{method} {phase}"] for phase in ("ramp", "final")]
        shown = [f"{percent(c['median'])} ({percent(c['min'])} - {percent(c['max'])})" for c in cells]
        by_row = state["floats per neuron"] < 10
        size = (
            f"{state['floats per neuron']:.2f} floats per neuron"
            if by_row
            else f"{state['bytes per weight']:.1f} bytes per weight"
        )
        rows.append([method, *shown, size])
    goal = percent(result["goals"]["machinery"])
    return [MACHINERY.format(goal=f"{goal} %"), table(["method", "ramp", "final", "state"], rows)]


def gain(results: list[dict[str, Any]]) -> list[str]:
    """Return the table of speed-ups by density."""
    densities = list(results[0]["ratio"])
    header = ["", *(word for d in densities for word in (f"{d}: speed-up", "share of ideal"))]
    rows = [
        [
            r["name"].replace("-", ", ", 1),
            *(w for d in densities for w in (spread(r["ratio"][d]), percent(r["share of ideal"][d]))),
        ]
        for r in results
    ]
    return [GAIN.format(goal=percent(results[0]["goals"]["ideal"])), table(header, rows)]


def limit(result: dict[str, Any]) -> list[str]:
    """Return the table of single layers that keep much of their matrix."""
    names = [key.rsplit(", ", 1) for key in result["ratio"]]
    shares = list(dict.fromkeys(share for _, share in names))
    rows = [
        [layer, *(spread(result["ratio"][f"{layer}, {share}"]) for share in shares)]
        for layer in dict.fromkeys(layer for layer, _ in names)
    ]
    return [LIMIT, table(["out x in", *shares], rows)]


def speed() -> list[str]:
    """Return the tables of the time that pruning costs and that compact layers save."""
    found = {r["name"]: r for r in load("pruning/speed")}
    if not found:
        return []
    lines = machinery(found["machinery-minilm-l6-h384"])
    lines += gain([r for name, r in found.items() if name.startswith(("layers", "net"))])
    lines += limit(found["limit"])
    return [*lines, origin(found["limit"], "pruning/speed", 1)]


def sections() -> list[str]:
    """Return the sections of the page that have results."""
    results = load(STUDY)
    if not results:
        return speed()
    cells = cells_of(results)
    made = {task: {updates(r) for r in results if r["task"] == task} for task in TASKS}
    head = HEAD.format(**{task: ", ".join(map(str, sorted(steps))) or "not run" for task, steps in made.items()})
    lines = [head, *comparison(cells), *densities(cells), *claims(cells), *ranks(cells)]
    return [*lines, origin(results[0], STUDY, 1, REPLACED), *speed()]
