"""Draw accuracy_vs_size.png from the results of the benchmarks: `python docs/figures/accuracy_vs_size.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_compress.evaluation.intervals import standard_error, wilson
from lit_compress.run.pictures import looks

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "second_order" / "results"
ROWS = 872  # of the dev set
Shown = dict[str, tuple[str, str, str]]  # cell or case -> label, the method whose colour it has, style of the line

UNTRAINED: Shown = {
    "kfac": ("second-order: components", "SecondOrder", "-"),
    "structures": ("second-order: heads, neurons", "SecondOrder", "--"),
    "inputs-global": ("inputs (DRONE, SVD-LLM)", "inputs", "-"),
    "fisher-both": ("diagonal Fisher", "FWSVD", "-"),
    "none": ("SVD", "SVD", "-"),
}
TRAINED: Shown = {
    "second_order": ("second-order: components", "SecondOrder", "-"),
    "structures": ("second-order: heads, neurons", "SecondOrder", "--"),
    "fwsvd": ("FWSVD", "FWSVD", "-"),
    "itp": ("ITP", "ITP", "-"),
    "losparse": ("LoSparse", "LoSparse", "-"),
    "lpaf": ("LPAF", "LPAF", "-"),
    "cofi": ("CoFi", "CoFi", "-"),
    "sp3": ("SP3", "SP3", "-"),
    "block_movement": ("Block movement", "BlockMovement", "-"),
    "theseus": ("BERT-of-Theseus", "Theseus", "-"),
    "flop": ("FLOP", "FLOP", "-"),
}
# densities on one place of the axis are drawn next to each other, in this factor
APART = 1.02


def density(result: dict[str, Any]) -> float:
    """Return the density of the exported file; older reports had there what the method kept, merged or not."""
    found = result["compressed"]
    merged = "kept" not in found and result.get("merged", {}).get("matrices")
    return found["stored"] if merged else found["density"]


def read(folder: Path, key: str, styles: Shown, pattern: str = "*.json") -> dict[str, list[dict[str, Any]]]:
    """Return the results of every cell or case of ``styles`` that has some, by size."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]
    found = {name: sorted((r for r in results if r[key] == name), key=density) for name in styles}
    return {name: cells for name, cells in found.items() if cells}


def draw(axes: Axes, found: dict[str, list[dict[str, Any]]], styles: Shown) -> None:
    """Draw dev accuracy over the density of the file, and the dense model's accuracy."""
    taken: dict[int, int] = {}
    methods = looks(method for _, method, _ in styles.values())
    for name, cells in found.items():
        label, method, line = styles[name]
        own = method == "SecondOrder"
        points = []
        for result in cells:
            place = round(100 * density(result))
            side = taken.get(place, 0)
            taken[place] = side + 1
            x = 100 * density(result) * APART ** ((side + 1) // 2 * (-1) ** side)
            error = 100 * standard_error(wilson(result["compressed"]["metric"], ROWS))
            points.append((x, 100 * result["compressed"]["metric"], error))
        marker = {"-": methods[method]["marker"], "--": "^", ":": "P"}[line]
        axes.errorbar(
            *zip(*points, strict=True), color=methods[method]["color"], marker=marker,
            markersize=8 if own else 6, label=label, linewidth=2 if own else 1.2, linestyle=line,
            zorder=3 if own else 2, capsize=2, elinewidth=0.8,
        )  # fmt: skip
    (dense,) = {100 * r["dense"]["metric"] for cells in found.values() for r in cells}
    axes.axhline(dense, color="black", linestyle="--", linewidth=1)
    axes.text(0.02, dense + 0.3, f"dense: {dense:.1f}", transform=axes.get_yaxis_transform(), fontsize=9)
    axes.set_xscale("log")
    axes.set(xlabel="density of the exported file, %")
    axes.grid(alpha=0.25)


def main() -> None:
    """Draw both panels."""
    figure = Figure(figsize=(12, 6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    draw(left, read(RESULTS, "cell", UNTRAINED), UNTRAINED)
    left.set(title="no training, 1,024 examples", ylabel="dev accuracy, %", ylim=(45, 89))
    draw(right, read(RESULTS / "trained", "case", TRAINED, "*-0.0003.json"), TRAINED)
    right.set(title="1,000 training steps", ylim=(75, 88.5))
    left.legend(loc="lower right", fontsize=9)
    right.legend(loc="lower left", fontsize=9)
    for axes, ticks in ((left, (10, 16, 25, 50)), (right, (3, 6, 10, 16, 25))):
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
    figure.suptitle(
        "SST-2, MiniLM-L6-H384, one fine-tuned model, one seed; bars: one standard error\n"
        "points at one density are drawn next to each other; the epoch kept was chosen on this dev set",
        fontsize=10,
    )
    figure.savefig(HERE / "accuracy_vs_size.png", dpi=110)


if __name__ == "__main__":
    main()
