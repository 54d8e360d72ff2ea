"""Pareto fronts: the models that no other model beats in both metric and cost, and their figure as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log, log10
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from lit_compress.analysis.gains import shared_gains
from lit_compress.analysis.inline import inline_svg
from lit_compress.analysis.styles import LIGHT, MARKERS, look, numbers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# name of the cost, where it is in a model's entry of the report, label of the axis
COSTS: dict[str, tuple[tuple[str, ...], str]] = {
    "parameters": (("params", "non_embedding"), "stored parameters without embeddings"),
    "flops": (("flops",), "FLOPs of one text"),
    "bytes": (("bytes",), "bytes on disk"),
    "latency": (("latency_ms", "median"), "CPU latency of one text, ms"),
}


def compact(value: float) -> str:
    """Return a number for an axis: three digits, thousands as k, M or G.

    >>> [compact(v) for v in (0.25, 12, 1_500, 2_000_000, 0)]
    ['0.25', '12', '1.5k', '2M', '0']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between ``low`` and ``high``, both above 0, for a logarithmic axis; about six.

    >>> log_ticks(1.2e6, 1.1e7)
    [2000000.0, 5000000.0, 10000000.0]
    """
    values = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        values = [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]
        if len(values) >= 3:
            break
    return values[:: max(1, len(values) // 6)] or [low]


def lines_of(places: Sequence[float], width: float) -> list[int]:
    """Return the line, from 0, on which each label is so that none of this width covers another.

    Args:
        places: where labels begin, horizontally.
        width: of a label.

    >>> lines_of([0, 3, 50, 4], 10)
    [0, 1, 0, 2]
    """
    rows, begins = [0] * len(places), list[float]()  # begins: of the last label on every line
    for i in sorted(range(len(places)), key=places.__getitem__):
        free = (line for line, begin in enumerate(begins) if places[i] - begin >= width)
        rows[i] = next(free, len(begins))
        begins[rows[i] : rows[i] + 1] = [places[i]]
    return rows


def cost_of(entry: dict[str, Any], cost: str) -> float | None:
    """Return a cost of a model from its entry in the report; None if it is not there."""
    value: Any = entry
    for key in COSTS[cost][0]:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def costs_of(reports: Sequence[dict[str, Any]]) -> tuple[list[dict[str, float | None]], dict[str, float | None]]:
    """Return every cost of the model of each report, and the mean costs of their dense models.

    A machine is not as fast at all times. Each report timed its model and its dense model in turns, so that speed-ups
    can be compared where milliseconds cannot: a model's latency is the mean of all dense models' over its speed-up,
    which models of equal shapes share (gains.py).
    """
    dense = {cost: mean_of_known([cost_of(report["dense"], cost) for report in reports]) for cost in COSTS}
    costs_by_net = []
    for report, gain in zip(reports, shared_gains(reports), strict=True):
        costs = {cost: cost_of(report["compressed"], cost) for cost in COSTS}
        if gain and dense["latency"]:
            costs["latency"] = dense["latency"] / gain.times
        costs_by_net.append(costs)
    return costs_by_net, dense


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def mean_costs(entries: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of every cost that is known."""
    return {cost: mean_of_known([entry[cost] for entry in entries]) for cost in COSTS}


def front(points: Sequence[tuple[float, float]], mode: str = "max") -> list[tuple[float, float]]:
    """Return the points (cost, metric) that no other is better than in both, cheapest first.

    >>> front([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.8)])
    [(1, 0.5), (3, 0.9)]
    """
    sign, kept = (1 if mode == "max" else -1), list[tuple[float, float]]()
    for x, y in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not kept or sign * y > sign * kept[-1][1]:
            kept.append((x, y))
    return kept


def edge_of(values: Sequence[float], dense: float, mode: str) -> float | None:
    """Return where a picture ends for models that are far behind; None if there are none, or no others.

    They would squeeze all others into a corner, so that they are drawn at the edge, with their number. Far behind is
    less than three quarters of the dense model's metric, or three times as much where less is better.

    >>> edge_of([0.9, 0.8, 0.1], 0.9, "max")
    0.78
    """
    sign, limit = (1, 0.75 * dense) if mode == "max" else (-1, 3 * dense)
    near = [value for value in values if sign * value >= sign * limit]
    if dense <= 0 or not near or len(near) == len(values):
        return None
    worst, best = (end((*near, dense), key=lambda value: sign * value) for end in (min, max))
    return round(worst - 0.2 * (best - worst or sign * 0.05 * dense), 12)


def write_pareto(
    groups: Sequence[dict[str, Any]], dense: dict[str, Any], metric: str, mode: str, folder: Path, name: str = "pareto"
) -> str:
    """Write the picture of :func:`pareto_figure` as ``<name>.png`` and ``<name>.svg``; return it as SVG for a page."""
    import matplotlib

    figure = pareto_figure(groups, dense, metric, mode)
    figure.savefig(folder / f"{name}.png")
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same file from the same numbers
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return inline_svg(figure, name, f"{metric} against costs")


def pareto_figure(groups: Sequence[dict[str, Any]], dense: dict[str, Any], metric: str, mode: str) -> Figure:
    """Return a figure of the metric against every cost.

    Args:
        groups: ``label``, ``mean``, ``bar`` (half the error bar, or None) and ``costs`` {name: mean}, as on the page.
        dense: ``mean`` and ``costs`` of the dense model, which is a star, its metric a dashed line.
        metric: label of the vertical axis.
        mode: ``max`` where more is better.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 7.6), layout="constrained", dpi=120)
    panels = list(figure.subplots(2, 2).flat)
    for axes, (cost, (_, title)) in zip(panels, COSTS.items(), strict=True):
        _panel(axes, groups, dense, cost, mode)
        axes.set(xlabel=title, ylabel=_plain(metric))
    shown = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    names = [name for name in dict.fromkeys([*(_plain(g["label"]) for g in groups), "dense"]) if name in shown]
    if names:
        columns = max(1, min(len(names), 150 // (8 + max(map(len, names)))))
        handles = [shown[name] for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, groups: Sequence[dict[str, Any]], dense: dict[str, Any], cost: str, mode: str) -> None:
    """Draw the groups whose cost is known, their front and the dense model."""
    some = [group for group in groups if group["costs"].get(cost)]
    edge = edge_of([group["mean"] for group in groups], dense["mean"], mode)
    far = [group for group in some if is_beyond(group["mean"], edge, mode)]
    values = [entry["costs"][cost] for entry in (*some, dense) if entry["costs"].get(cost)]
    heights = lines_of(_shares([group["costs"][cost] for group in far], values), 0.11)
    for label, number in numbers_of(group["label"] for group in groups).items():
        line = sorted((g for g in some if g["label"] == label), key=lambda group: group["costs"][cost])
        near, (colour, shape) = [g for g in line if g not in far], look(number)
        color = LIGHT[colour]
        if near:
            axes.errorbar(
                [g["costs"][cost] for g in near], [g["mean"] for g in near], [g["bar"] or 0 for g in near],
                marker=MARKERS[shape], linewidth=1, capsize=2, label=_plain(label), color=color, markersize=5,
            )  # fmt: skip
        for group in line:
            if edge is None or group not in far:
                continue
            x, up = group["costs"][cost], 8 * heights[far.index(group)] * (1 if mode == "max" else -1)
            axes.plot(
                x, edge, "v" if mode == "max" else "^", label="" if near else _plain(label), color=color, markersize=5
            )
            axes.annotate(
                compact(group["mean"]), (x, edge), (5, up), textcoords="offset points", fontsize=7, va="center",
                color=color, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    best = front([(g["costs"][cost], g["mean"]) for g in some if g not in far], mode)
    if best:
        axes.step(*zip(*best, strict=True), where="post", color="0.6", linestyle=":", zorder=0)
    axes.axhline(dense["mean"], color="0.5", linewidth=0.8, linestyle="--", zorder=0)
    if dense["costs"].get(cost):
        axes.plot(dense["costs"][cost], dense["mean"], "*", color="0.15", markersize=10, label="dense")
    _scale(axes, values)
    axes.grid(alpha=0.3)


def is_beyond(value: float, edge: float | None, mode: str) -> bool:
    """Return whether a metric is beyond the edge of a picture; see :func:`edge_of`."""
    return edge is not None and (value < edge if mode == "max" else value > edge)


def _plain(text: str) -> str:
    """Return a text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Label the horizontal axis with round numbers; it is logarithmic where costs are far apart, as on the page."""
    if _is_log(values):
        axes.set_xscale("log")
        axes.set_xticks(log_ticks(min(values), max(values)))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))


def _is_log(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > 3 * min(values)


def _shares(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return where ``places`` are on the horizontal axis of all ``values``, from 0 to 1."""
    scale: Callable[[float], float] = log if _is_log(values) else float
    low, high = (scale(end(values)) for end in (min, max)) if values else (0.0, 1.0)
    return [(scale(place) - low) / ((high - low) or 1.0) for place in places]
