"""The tables of the scripts with one dense model per task and held-out rows: K-prune, and other estimates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import load, origin, percent, table

STUDY = "second_order"

UNTRAINED = """### Without labels, compared with K-prune

One teacher per task, trained without the held-out rows (as `compare` does), and 1,024 training texts for all methods. K-prune
(arXiv 2308.03449) is re-implemented here from the paper. After it: `--refine` trains each block, `--distil` the whole model on at most
8,000 training texts, both without labels. The metric in % on the dev set / on the held-out rows. {rows}.
Processor seconds of each step in the row, at the smallest density.
"""

ESTIMATES = """### Other estimates of the Fisher information

What each estimate chooses right after the factorization: the measured loss, which is the mean KL from the dense model on the held-out rows
({rows}) with its standard error, and in brackets the metric in % on these rows. Calibration on {texts} training texts, one seed.
K-FAC: this project's estimate. Ladder: its costs are rescaled to divergences that are measured by removing shares of one sub-layer at a
time; heads and neurons only. 1 / length: a token of a long text counts less. Reduce: K-FAC-reduce. Nearest: the Kronecker product nearest
to the observed Fisher information.
"""

ESTIMATE_NAMES = {"kfac": "K-FAC", "ladder": "ladder", "length": "1 / length", "reduce": "reduce", "nearest": "nearest"}

UNTRAINED_NAMES = {"structures": "K-FAC, heads and neurons", "kprune": "K-prune", "components": "K-FAC, components",
                   "search": "one search over sub-layers, heads and neurons"}  # fmt: skip
AFTER = {"": "nothing", "refined": "`--refine 100`", "distilled": "`--distil 300`", "longer": "`--distil 800`"}


def untrained() -> Iterator[str]:
    """Yield the table of models made smaller without labels, next to K-prune."""
    found: dict[str, dict[tuple[str, str, float], dict[str, Any]]] = {}
    for result in load(f"{STUDY}/untrained"):
        found.setdefault(result["task"], {})[result["cell"], result["after"], result["target"]] = result
    if not found:
        return

    def scores(result: dict[str, Any]) -> str:
        return " / ".join(percent(result[part][f"val/{result['metric']}"]) for part in ("dev", "held_out"))

    densities = sorted({target for cells in found.values() for *_, target in cells} - {1.0}, reverse=True)
    rows, sizes = [], []
    for task, cells in found.items():
        dense = cells["dense", "", 1.0]
        counts = " / ".join(f"{dense[part]['val/rows']:,.0f}" for part in ("dev", "held_out"))
        sizes.append(f"{task}, {dense['metric']}: {counts} rows, dense {scores(dense)}")
        for cell, after in ((c, a) for a in AFTER for c in UNTRAINED_NAMES):
            own = [cells.get((cell, after, target)) for target in densities]
            if any(own):
                seconds = f"{own[-1]['seconds']:,.0f}" if own[-1] else ""
                shown = (scores(result) if result else "" for result in own)
                rows.append([task, UNTRAINED_NAMES[cell], AFTER[after], *shown, seconds])
    yield UNTRAINED.format(rows="; ".join(sizes))
    yield table(["task", "method", "after it", *(f"{target:g}" for target in densities), "seconds"], rows)
    yield origin(next(iter(next(iter(found.values())).values())), f"{STUDY}/untrained", 1)


def estimates() -> Iterator[str]:
    """Yield the table of other estimates of the Fisher information."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for result in load(f"{STUDY}/estimates"):
        found.setdefault((result["task"], result["removes"]), {})[result["variant"]] = result
    if not found:
        return

    def shown(made: dict[str, Any] | None, density: str) -> str:
        if made is None:
            return "-"
        row = made["rows"][density]
        return f"{row['measured']:.3f} ± {row['error']:.3f} ({percent(row['metric'])})"

    rows, first = [], next(iter(next(iter(found.values())).values()))
    for (task, removes), made in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "structures")):
        removed = "heads, neurons" if removes == "structures" else removes
        for density in next(iter(made.values()))["rows"]:
            rows.append([task, removed, density, *(shown(made.get(name), density) for name in ESTIMATE_NAMES)])
    held = {task: next(iter(made.values()))["held_out"] for (task, _), made in found.items()}
    yield ESTIMATES.format(rows=", ".join(f"{task}: {count:,}" for task, count in held.items()), texts=first["texts"])
    yield table(["task", "removed", "density", *ESTIMATE_NAMES.values()], rows)
    yield origin(first, f"{STUDY}/estimates", 1)
