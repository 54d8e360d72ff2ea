"""Draw accuracy_vs_size.png from the results of the benchmarks: `python docs/figures/accuracy_vs_size.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
STUDIES = {
    "second_order": "no training, 1,024 examples",
    "pruning": "250 updates, batch 32",
    "cofi": "750 updates, batch 16",
    "sp3": "1,000 updates (CoFi 1,500), batch 16",
}
STANDARD_ERROR = 1.3  # of an accuracy on 872 sentences, in points

# start of a file's name after "sst2-" -> label, colour, marker; the longest start that fits decides
STYLES = {
    "losparse": ("LoSparse", "#1f77b4", "o"),
    "losparse-layers": ("LoSparse + layers", "#17becf", "o"),
    "itp": ("ITP", "#ff7f0e", "s"),
    "movement": ("Movement", "#8c564b", "v"),
    "low_rank_1": ("Low-rank I", "#7f7f7f", "<"),
    "low_rank_2": ("Low-rank II", "#bcbd22", ">"),
    "platon": ("PLATON", "#e377c2", "P"),
    "first_order": ("first-order", "#9467bd", "X"),
    "magnitude": ("magnitude", "#333333", "*"),
    "cofi": ("CoFi", "#2ca02c", "^"),
    "cofi_losparse": ("CoFi x LoSparse", "#98df8a", "^"),
    "pca": ("SP3", "#d62728", "D"),
    "identity": ("SP3 without PCA", "#f7a6a6", "D"),
}
CELLS = {  # of the study of second-order compression
    "kfac": ("second-order (K-FAC)", "#000000", "o"),
    "both": ("+ heads, neurons", "#d62728", "P"),
    "structures": ("heads, neurons only", "#2ca02c", "^"),
    "inputs-global": ("inputs (DRONE, SVD-LLM)", "#1f77b4", "s"),
    "fisher-both": ("diagonal Fisher", "#ff7f0e", "v"),
    "none": ("SVD", "#7f7f7f", "<"),
}
LEFT_OUT = ("labels", "hidden")  # CoFi with another loss; gates of hidden states only


def density(result: dict[str, Any]) -> float:
    """Return the density of the exported file; older reports had there what the method kept, merged or not."""
    found = result["compressed"]
    merged = "kept" not in found and result.get("merged", {}).get("matrices")
    return found["stored"] if merged else found["density"]


def smaller(result: dict[str, Any]) -> bool:
    """Say whether the exported file has fewer weights than the dense net's."""
    return result["compressed"]["params"]["sites"] < result["dense"]["params"]["sites"]


def read(study: str) -> dict[str, dict[float, dict[str, Any]]]:
    """Return style -> density asked for -> the best result of a study on SST-2."""
    if study == "second_order":
        return cells_of(study)
    folders = [BENCHMARKS / "results" / study, BENCHMARKS / study / "results"]
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for path in sorted(path for folder in folders for path in folder.glob("sst2-*.json")):
        name, result = path.stem.removeprefix("sst2-"), json.loads(path.read_text())
        if any(word in name.split("-") for word in LEFT_OUT):
            continue
        style = max((key for key in STYLES if name.startswith(f"{key}-")), key=len)
        cells = found.setdefault(style, {})
        asked = result["config"]["model"]["init_args"]["density"]
        if asked not in cells or result["compressed"]["metric"] > cells[asked]["compressed"]["metric"]:
            cells[asked] = result
    return found


def cells_of(study: str) -> dict[str, dict[float, dict[str, Any]]]:
    """Return cell -> density asked for -> result of the study of second-order compression."""
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for path in sorted((BENCHMARKS / study / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if result["cell"] in CELLS:
            found.setdefault(result["cell"], {})[result["target"]] = result
    return {cell: found[cell] for cell in CELLS if cell in found}


def draw(axes: Axes, found: dict[str, dict[float, dict[str, Any]]]) -> float:
    """Draw a study and return the accuracy of its dense net, in %."""
    for style, cells in found.items():
        _, colour, marker = (STYLES | CELLS)[style]
        points = sorted((100 * density(r), 100 * r["compressed"]["metric"], smaller(r)) for r in cells.values())
        face = colour if all(small for *_, small in points) else "white"
        axes.plot(
            [x for x, *_ in points], [y for _, y, _ in points], color=colour, marker=marker, markerfacecolor=face,
            markersize=8, linewidth=1.5,
        )  # fmt: skip
    (dense,) = {100 * r["dense"]["metric"] for cells in found.values() for r in cells.values()}
    axes.axhline(dense, color="black", linestyle="--", linewidth=1)
    axes.text(0.03, dense + 0.15, f"dense: {dense:.1f}", transform=axes.get_yaxis_transform(), fontsize=9)
    return dense


def main() -> None:
    """Draw the four studies side by side."""
    figure = Figure(figsize=(14, 7), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4, sharey=True)
    shown: list[str] = []
    for axes, (study, title) in zip(panels, STUDIES.items(), strict=True):
        found = read(study)
        draw(axes, found)
        shown += [style for style in found if style not in shown]
        axes.set(xlabel="density of the exported file, %", title=title, xlim=(0, 54 if study == "second_order" else 44))
        axes.set_xticks({"sp3": [6, 12, 20, 30, 40], "second_order": [10, 16, 25, 50]}.get(study, [10, 20, 30, 40]))
        axes.errorbar([40], [64], yerr=[STANDARD_ERROR], color="gray", capsize=4)
        axes.text(axes.get_xlim()[1] - 1, 61.6, "± one standard error", color="gray", fontsize=9, ha="right")
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="dev accuracy, %", ylim=(60, 88.8))
    handles = [
        Line2D([], [], color=colour, marker=marker, label=label)
        for label, colour, marker in (style for name, style in (CELLS | STYLES).items() if name in shown)
    ]
    zeros = "file holds zeros, not smaller"
    handles.append(Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label=zeros))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(
        "SST-2, MiniLM-L6-H384, from one fine-tuned net per panel, one seed; with training: 4,000 examples, and\n"
        "learning rates, rates of gates and the epoch kept were chosen on this dev set. Compare within a panel. "
        "Less than 60 is not shown.",
        fontsize=10.5,
    )
    figure.savefig(HERE / "accuracy_vs_size.png", dpi=110)


if __name__ == "__main__":
    main()
