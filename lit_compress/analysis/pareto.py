"""Pareto fronts: which nets no other net is better than in both metric and cost, and their figure as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_compress.analysis.plots import _figure

# name of the cost, where it stands in a net's entry of the report, label of the axis
COSTS: dict[str, tuple[tuple[str, ...], str]] = {
    "parameters": (("params", "non_embedding"), "stored parameters without embeddings"),
    "flops": (("flops",), "FLOPs of one text"),
    "bytes": (("bytes",), "bytes on disk"),
    "latency": (("latency_ms", "median"), "CPU latency of one text, ms (median)"),
}


def cost_of(entry: dict[str, Any], cost: str) -> float | None:
    """Return a cost of a net from its entry in the report; None if it is not there."""
    value: Any = entry
    for key in COSTS[cost][0]:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def front(points: Sequence[tuple[float, float]], mode: str = "max") -> list[tuple[float, float]]:
    """Return the points (cost, metric) that no other is better than in both, cheapest first.

    >>> front([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.8)])
    [(1, 0.5), (3, 0.9)]
    """
    sign, found = (1 if mode == "max" else -1), []
    for x, y in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not found or sign * y > sign * found[-1][1]:
            found.append((x, y))
    return found


def write_pareto(groups: Sequence[dict[str, Any]], metric: str, mode: str, folder: Path, name: str = "pareto") -> None:
    """Draw the metric against every cost, and write it as ``<name>.png`` and ``<name>.svg``.

    Args:
        groups: ``label``, ``mean``, ``spread`` (None for one run) and ``costs`` {name: mean}, as on the page.
        metric: label of the vertical axis.
        mode: ``max`` where more is better.
        folder: to write into.
        name: of the files.
    """
    import matplotlib

    figure, panels = _figure(len(COSTS), (4.4, 4.0))
    labels = list(dict.fromkeys(group["label"] for group in groups))
    for axes, (cost, (_, title)) in zip(panels, COSTS.items(), strict=True):
        for number, label in enumerate(labels):
            some = sorted((g for g in groups if g["label"] == label and g["costs"].get(cost)), key=_by(cost))
            if some:
                axes.errorbar(
                    [g["costs"][cost] for g in some], [g["mean"] for g in some], [g["spread"] or 0 for g in some],
                    marker="os^D"[number % 4], markersize=5, linewidth=1, capsize=2, label=label.replace("$", r"\$"),
                    color=f"C{number % 10}",
                )  # fmt: skip
        best = front([(g["costs"][cost], g["mean"]) for g in groups if g["costs"].get(cost)], mode)
        axes.step(*zip(*best, strict=True), where="post", color="0.6", linestyle=":", zorder=0) if best else None
        axes.set(xlabel=title, ylabel=metric.replace("$", r"\$"), xscale="log")
        axes.grid(alpha=0.3)
    handles, names = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=min(5, len(names)), fontsize=8)
    figure.savefig(folder / f"{name}.png")
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same file from the same numbers
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def _by(cost: str) -> Any:
    return lambda group: group["costs"][cost]
