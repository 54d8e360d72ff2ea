"""Draw accuracy_vs_size.png from the results of the benchmarks: `python docs/figures/accuracy_vs_size.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "second_order" / "results"
STANDARD_ERROR = 1.2  # of an accuracy on 872 sentences, in points
Styles = dict[str, tuple[str, str, str]]  # cell or case -> label, colour, marker

UNTRAINED: Styles = {
    "kfac": ("second-order: components", "#000000", "o"),
    "structures": ("second-order: heads, neurons", "#2ca02c", "^"),
    "both": ("second-order: both", "#d62728", "P"),
    "inputs-global": ("inputs (DRONE, SVD-LLM)", "#1f77b4", "s"),
    "fisher-both": ("diagonal Fisher", "#ff7f0e", "v"),
    "none": ("SVD", "#7f7f7f", "<"),
}
TRAINED: Styles = {
    "second_order": ("second-order: components", "#000000", "o"),
    "structures": ("second-order: heads, neurons", "#2ca02c", "^"),
    "fwsvd": ("FWSVD", "#ff7f0e", "v"),
    "itp": ("ITP", "#e377c2", "s"),
    "losparse": ("LoSparse", "#1f77b4", "D"),
    "lpaf": ("LPAF", "#8c564b", ">"),
    "cofi": ("CoFi", "#17becf", "p"),
    "sp3": ("SP3", "#d62728", "P"),
    "block_movement": ("Block movement", "#9467bd", "X"),
    "theseus": ("BERT-of-Theseus", "#bcbd22", "*"),
    "flop": ("FLOP", "#7f7f7f", "<"),
}


def density(result: dict[str, Any]) -> float:
    """Return the density of the exported file; older reports had there what the method kept, merged or not."""
    found = result["compressed"]
    merged = "kept" not in found and result.get("merged", {}).get("matrices")
    return found["stored"] if merged else found["density"]


def read(folder: Path, key: str, styles: Styles, pattern: str = "*.json") -> dict[str, list[dict[str, Any]]]:
    """Return the results of every cell or case of ``styles`` that has some, by size."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
    found = {name: sorted((r for r in results if r[key] == name), key=density) for name in styles}
    return {name: cells for name, cells in found.items() if cells}


def draw(axes: Axes, found: dict[str, list[dict[str, Any]]], styles: Styles) -> None:
    """Draw dev accuracy over the density of the file, and the dense model's accuracy."""
    for name, cells in found.items():
        label, colour, marker = styles[name]
        points = [(100 * density(r), 100 * r["compressed"]["metric"]) for r in cells]
        own = label.startswith("second-order")
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, markersize=9 if own else 7, label=label,
            linewidth=2 if own else 1.2, zorder=3 if own else 2,
        )  # fmt: skip
    (dense,) = {100 * r["dense"]["metric"] for cells in found.values() for r in cells}
    axes.axhline(dense, color="black", linestyle="--", linewidth=1)
    axes.text(0.02, dense + 0.15, f"dense: {dense:.1f}", transform=axes.get_yaxis_transform(), fontsize=9)
    axes.set_xscale("log")
    axes.set(xlabel="density of the exported file, %")
    axes.grid(alpha=0.25)


def main() -> None:
    """Draw both panels."""
    figure = Figure(figsize=(12, 6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    draw(left, read(RESULTS, "cell", UNTRAINED), UNTRAINED)
    left.set(title="no training, 1,024 examples", ylabel="dev accuracy, %", ylim=(45, 88))
    draw(right, read(RESULTS / "trained", "case", TRAINED, "*-0.0003.json"), TRAINED)
    right.set(title="1,000 updates", ylim=(75, 87.5))
    left.legend(loc="lower right", fontsize=9)
    right.legend(loc="lower left", fontsize=9)
    for axes, ticks, x, y in ((left, (10, 16, 25, 50), 10, 56), (right, (3, 6, 10, 16, 25), 13, 77)):
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.errorbar([x], [y], yerr=[STANDARD_ERROR], color="gray", capsize=4)
        axes.text(1.04 * x, y, "± one standard error", color="gray", fontsize=9, va="center")
    figure.suptitle(
        "SST-2, MiniLM-L6-H384, one fine-tuned model, one seed; the epoch kept was chosen on this dev set", fontsize=11
    )
    figure.savefig(HERE / "accuracy_vs_size.png", dpi=110)


if __name__ == "__main__":
    main()
