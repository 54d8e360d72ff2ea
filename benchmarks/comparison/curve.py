"""Six methods at three densities: their table, and the picture for README.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import file_density, percent, table
from benchmarks.comparison.front_table import NAMES
from lit_compress.evaluation.intervals import standard_error
from lit_compress.run.pictures import looks

HEAD = """## The six best at other densities

Dev metric in %, seed {seed}, as above. All runs of a task have one teacher. In brackets: the stored density, if it is
more than 1 % off. ITP's and LoSparse's are of an earlier version.
"""
PICTURE = """![Dev metric over density, six methods on two tasks](figures/curve.png)

Bars: one standard error over the dev set. Points at one density are drawn next to each other.
Points far below are at the edge, with their number.
"""
USUAL = 0.1  # the density of all methods but whole blocks, which have densities of their own
APART = 1.025  # factor between two points of one density
Curves = dict[str, dict[float, dict[str, Any]]]  # method -> density asked for -> run


def asked(run: dict[str, Any]) -> float:
    """Return the density that a run was asked for."""
    return float(run["asked"].removeprefix("density="))


def curves(runs: list[dict[str, Any]]) -> Curves:
    """Return the methods that the task's runs have at several densities with one seed; {} without any."""
    found: dict[tuple[str, int], dict[float, dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["label"], run["seed"]), {})[asked(run)] = run
    most = max((len(made) for made in found.values()), default=0)
    several = {
        label: dict(sorted(made.items(), reverse=True))
        for (label, _), made in found.items()
        if len(made) == most > 1 and USUAL in made
    }
    return dict(sorted(several.items(), key=lambda item: -sum(run["compressed"]["metric"] for run in item[1].values())))


def section(made: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the table of all tasks that have such runs, and the picture.

    Args:
        made: every run of every task.
    """
    tasks = {task: found for task, runs in made.items() if (found := curves(runs))}
    if not tasks:
        return
    first = next(iter(tasks.values()))
    (example, *_), *_ = (list(found.values()) for found in tasks.values())
    columns = [(task, density) for task in tasks for density in example]
    rows = [
        [label, *(_cell(tasks[task][label][density]) for task, density in columns)]
        for label in first
        if all(label in found for found in tasks.values())
    ]
    dense = [percent(next(iter(tasks[task].values()))[density]["dense"]["metric"]) for task, density in columns]
    yield HEAD.format(seed=next(iter(example.values()))["seed"])
    yield table(["method", *(f"{NAMES[task]}, {density:.2f}" for task, density in columns)], [["dense", *dense], *rows])
    yield PICTURE


def _cell(run: dict[str, Any]) -> str:
    """Return the metric of a run, with the stored density if it is more than 1 % off."""
    metric, found = percent(run["compressed"]["metric"]), file_density(run)
    return metric if abs(found / asked(run) - 1) <= 0.01 else f"{metric} ({found:.3f})"


def figure(made: dict[str, list[dict[str, Any]]]) -> Any:
    """Return the picture: a panel for each task, the metric over the density asked for, with standard errors.

    Args:
        made: every run of every task.
    """
    from matplotlib.figure import Figure

    tasks = {task: found for task, runs in made.items() if (found := curves(runs))}
    drawn = Figure(figsize=(5.6 * len(tasks), 4.4), layout="constrained", dpi=110)
    panels = drawn.subplots(1, len(tasks), squeeze=False)[0]
    for axes, (task, found) in zip(panels, tasks.items(), strict=True):
        runs = [run for made in found.values() for run in made.values()]
        dense = 100 * runs[0]["dense"]["metric"]
        edge = _edge([100 * run["compressed"]["metric"] for run in runs], dense)
        for place, (label, look) in enumerate(looks(sorted(found)).items()):
            own, apart = label.startswith("SecondOrder"), APART ** (place - (len(found) - 1) / 2)
            points = [
                (
                    100 * density * apart,
                    100 * run["compressed"]["metric"],
                    100 * standard_error(run["compressed"]["interval"]),
                )
                for density, run in found[label].items()
            ]
            axes.errorbar(
                *zip(*(point for point in points if point[1] >= edge), strict=True), capsize=2,
                elinewidth=0.8, linewidth=2 if own else 1.2, **look,
                markersize=7 if own else 6, label=label, zorder=3 if own else 2,
            )  # fmt: skip
            for x, y, _ in points:
                if y < edge:
                    axes.plot(x, edge, "v", color=look["color"])
                    axes.annotate(f"{y:.1f}", (x, edge), (6, 0), textcoords="offset points", fontsize=8, va="center")
        axes.axhline(dense, color="grey", linewidth=0.8, linestyle="--", label="dense")
        axes.set_xscale("log")
        ticks = [100 * density for density in next(iter(found.values()))]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set(
            xlabel="density asked for: % of the weights of the blocks' matrices",
            ylabel="dev metric in %",
            title=f"{NAMES[task]}, MiniLM-L6-H384",
        )
        axes.grid(alpha=0.3)
    handles, names = panels[0].get_legend_handles_labels()
    drawn.legend(handles, names, fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    return drawn


def _edge(values: list[float], dense: float) -> float:
    """Return where the picture ends: a little below the worst model that has three quarters of the dense metric."""
    near = [value for value in values if value >= 0.75 * dense]
    if len(near) in (0, len(values)):
        return min(values)
    worst, best = min(*near, dense), max(*near, dense)
    return worst - 0.2 * (best - worst or 0.05 * dense)
