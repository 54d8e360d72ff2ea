"""The table and the figure of ``bench --against``: accuracy, size and speed of every model in every runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_compress.analysis.pareto import front
from lit_compress.utils.tables import screen_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Alternative:
    """A model in a runtime.

    Attributes:
        net: label of the model.
        runtime: its name.
        metric: the first dev metric.
        error: half of its 95 % interval; None if it has none.
        megabytes: of the file; None if it is not known.
        milliseconds: median of a forward of the smallest batch.
        texts: per second with the largest batch.
        steady: whether both times can be trusted.
        far: whether integers change the results by more than is usual.
    """

    net: str
    runtime: str
    metric: float
    error: float | None
    megabytes: float | None
    milliseconds: float
    texts: float
    steady: bool
    far: bool


def shapes_shown(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shapes with the smallest and the largest batch, at the median length of the task if it is there."""
    lengths = [shape["length"] for shape in result["shapes"]]
    median = result["own_lengths"].get("median")
    length = median if median in lengths else min(lengths)
    at = sorted((shape for shape in result["shapes"] if shape["length"] == length), key=lambda shape: shape["batch"])
    return at[0], at[-1]


def alternatives(result: dict[str, Any]) -> list[Alternative]:
    """Return every model and runtime whose accuracy and times are known, in the order of the result."""
    first, last = shapes_shown(result)
    one, many = ({(e["net"], e["runtime"]): e for e in shape["times"]} for shape in (first, last))
    rows = []
    for entry in result["programs"]:
        key = entry["net"], entry["runtime"]
        if entry.get("metric") is None or key not in one or key not in many:
            continue
        low, high = entry["interval"] or (None, None)
        error = None if low is None or high is None else (high - low) / 2
        size = entry["bytes"] and entry["bytes"] / 1e6
        texts = 1000 * last["batch"] / many[key]["median"]
        steady = one[key]["steady"] and many[key]["steady"]
        rows.append(Alternative(*key, entry["metric"], error, size, one[key]["median"], texts, steady, entry["far"]))
    return rows


COSTS = {"ms": "milliseconds", "MB": "megabytes"}


def fronts(rows: list[Alternative], mode: str) -> dict[str, list[Alternative]]:
    """Return by cost the rows that no other is better than in both metric and cost, cheapest first.

    Args:
        rows: models in runtimes.
        mode: ``max`` if more of the metric is better.
    """
    best: dict[str, list[Alternative]] = {}
    for cost, field in COSTS.items():
        points = {(getattr(row, field), row.metric): row for row in rows[::-1] if getattr(row, field) is not None}
        best[cost] = [points[point] for point in front(list(points), mode)]
    return best


def alternatives_table(result: dict[str, Any]) -> Table:
    """Return the table for the terminal: a row for every model in every runtime."""
    rows, (first, last) = alternatives(result), shapes_shown(result)
    best = fronts(rows, result["metric"]["mode"])
    header = ["model", "runtime", result["metric"]["name"], "MB", f"ms, {first['batch']} x {first['length']}",
              f"texts/s, {last['batch']} x {last['length']}", "front"]  # fmt: skip
    body = []
    for row in rows:
        error = ("" if row.error is None else f" ± {row.error:.4f}") + "!" * row.far
        size = "" if row.megabytes is None else f"{row.megabytes:.1f}"
        marks = ", ".join(cost for cost in COSTS if row in best[cost])
        noisy = "" if row.steady else "?"
        body.append([row.net, row.runtime, f"{row.metric:.4f}{error}", size, f"{row.milliseconds:.2f}{noisy}",
                     f"{row.texts:,.0f}{noisy}", marks])  # fmt: skip
    return screen_table(header, body, left=2, whole=2)


def alternatives_figure(result: dict[str, Any]) -> Figure:
    """Draw the metric over milliseconds and over megabytes; a dotted line joins the front of each."""
    from matplotlib.figure import Figure

    rows, mode = alternatives(result), result["metric"]["mode"]
    best, (first, _) = fronts(rows, mode), shapes_shown(result)
    nets, runtimes = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("net", "runtime"))
    figure = Figure(figsize=(9.6, 4.2), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"ms": f"ms, {first['batch']} x {first['length']} tokens", "MB": "MB"}
    for axes, (cost, field) in zip(panels, COSTS.items(), strict=True):
        for row in (row for row in rows if getattr(row, field) is not None):
            axes.errorbar(
                [getattr(row, field)], [row.metric], [row.error or 0], color=f"C{nets.index(row.net) % 10}", capsize=2,
                marker="os^Dvp*"[runtimes.index(row.runtime) % 7], label=f"{row.net}, {row.runtime}", linestyle="",
                markersize=8 if row in best[cost] else 4,
            )  # fmt: skip
        line = [(getattr(row, field), row.metric) for row in best[cost]]
        if line:
            axes.step(*zip(*line, strict=True), where="post", color="0.5", linestyle=":", zorder=0)
        axes.set(xlabel=titles[cost], xscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(result["metric"]["name"])
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    figure.suptitle("large: no other is better in both; dotted: the front", fontsize=9)
    return figure
