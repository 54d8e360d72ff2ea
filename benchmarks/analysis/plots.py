"""Figures of the tables of ``truncation.py``, ``pruning.py`` and ``widths.py``, and their files: CSV and PNG."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.analysis.widths import width_figure
from lit_compress.run.pictures import looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.analysis.truncation import TableRows


def _figure(columns: int = 1, size: tuple[float, float] = (6.4, 4.2)) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1]), layout="constrained", dpi=120)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _by(rows: TableRows, key: str) -> dict[Any, TableRows]:
    return {value: [r for r in rows if r[key] == value] for value in dict.fromkeys(r[key] for r in rows)}


def _curves(axes: Axes, rows: TableRows, x: str, y: str, by: str = "weighting") -> None:
    styles = looks(str(row[by]) for row in rows) if by == "method" else {}
    for label, group in _by(rows, by).items():
        look: dict[str, Any] = styles.get(label, {"marker": "o"})
        axes.plot([r[x] for r in group], [r[y] for r in group], markersize=4, label=label, **look)
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    axes.grid(alpha=0.3)


def truncation_figure(rows: TableRows) -> Figure:
    """Draw the drop of the metric, the reconstruction error and the mean singular value for every removed group."""
    figure, (drop, error, sigma) = _figure(3, (4.6, 3.8))
    labels = _by(rows, "weighting")
    width = 0.8 / len(labels)
    for i, (label, group) in enumerate(labels.items()):
        drop.bar([r["group"] - 0.4 + (i + 0.5) * width for r in group], [r["drop"] for r in group], width, label=label)
    drop.set(xlabel="group of components removed", ylabel="drop of the dev metric", xticks=range(1, 11))
    drop.axhline(0, color="black", linewidth=0.6)
    drop.legend()
    _curves(error, rows, "group", "error")
    error.set(ylabel="reconstruction error, mean over matrices")
    _curves(sigma, rows, "group", "sigma")
    sigma.set(yscale="log", ylabel="mean singular value (weighted)")
    return figure


def sweep_figure(rows: TableRows) -> Figure:
    """Draw the dev metric over the ratio of ranks kept."""
    figure, (axes,) = _figure()
    _curves(axes, rows, "rank_ratio", "metric")
    axes.set(ylabel="dev metric, no retraining", xlabel="ratio of ranks kept")
    axes.legend()
    return figure


def spectra_figure(rows: TableRows) -> Figure:
    """Draw the singular values of every site, each divided by its largest; one colour per kind of matrix."""
    labels, roles = _by(rows, "weighting"), list(_by(rows, "role"))
    figure, panels = _figure(len(labels), (5.2, 4.0))
    for axes, (label, group) in zip(panels, labels.items(), strict=True):
        for site in _by(group, "site").values():
            values = [r["sigma"] / site[0]["sigma"] for r in site]
            axes.plot([r["index"] for r in site], values, linewidth=0.7, color=f"C{roles.index(site[0]['role'])}")
        axes.set(title=label, xlabel="component", ylabel="singular value / largest", yscale="log")
        axes.grid(alpha=0.3)
    for i, role in enumerate(roles):
        panels[0].plot([], [], color=f"C{i}", label=role)
    panels[0].legend(title="matrix", fontsize=8)
    return figure


def ranks_figure(rows: TableRows) -> Figure:
    """Draw rank / full rank of every site by layer, one line per role; for several models draw :func:`rank_curve`."""
    if len(_by(rows, "model")) > 1:
        return rank_curve(rows)
    figure, (axes,) = _figure()
    shares = [{**r, "rank / full rank": r["rank"] / min(r["out"], r["in"])} for r in rows]
    _curves(axes, shares, "layer", "rank / full rank", by="role")
    mean = sum(r["rank"] for r in rows) / len(rows)
    axes.set(ylim=(0, 1.05), title=f"mean rank {mean:.1f}")
    axes.legend(ncols=3)
    return figure


def rank_curve(rows: TableRows) -> Figure:
    """Draw the mean rank of several models over the density of their matrices, a line per method (LPAF's Figure 2)."""
    figure, (axes,) = _figure()
    points: TableRows = []
    for sites in _by(rows, "model").values():
        size = sum(r["out"] * r["in"] for r in sites)
        density = sum(r["density"] * r["out"] * r["in"] for r in sites) / size
        mean = sum(r["rank"] for r in sites) / len(sites)
        points.append({"method": sites[0]["method"], "density": density, "mean rank": mean})
    _curves(axes, sorted(points, key=lambda p: p["density"]), "density", "mean rank", by="method")
    axes.set(ylim=(0, None))
    axes.legend()
    return figure


def neurons_figure(rows: TableRows) -> Figure:
    """Draw histograms of the neurons' importance by layer and role, with all models in each (LoSparse's Figure 4)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    roles, layers = list(_by(rows, "role")), list(_by(rows, "layer"))
    figure = Figure(figsize=(0.5 + 2.2 * len(roles), 0.5 + 1.5 * len(layers)), layout="constrained", dpi=100)
    grid = figure.subplots(len(layers), len(roles), squeeze=False, sharex=True)
    for (layer, role), axes in zip(((x, y) for x in layers for y in roles), grid.flat, strict=True):
        here = [r for r in rows if r["layer"] == layer and r["role"] == role]
        least = min((r["importance"] for r in here if r["importance"] > 0), default=1.0)
        most = max(r["importance"] for r in here)
        steps = 40 if most > least else 1
        edges = [least * (most / least) ** (i / steps) for i in range(steps)] + [max(most, least) * 1.001]
        for label, group in _by(here, "model").items():
            values = [max(r["importance"], least) for r in group]
            axes.hist(values, bins=edges, alpha=0.6, label=label)
        axes.set(xscale="log", title=f"layer {layer}, {role}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=6)
        axes.title.set_fontsize(8)
    figure.supxlabel("importance of a neuron: mean |w g| of its row")
    figure.supylabel("neurons")
    grid[0][0].legend(fontsize=6)
    return figure


def pattern_figure(rows: TableRows) -> Figure:
    """Draw which weights of a matrix are not zero, for several models side by side (LPAF's Figure 3)."""
    models = _by(rows, "model")
    figure, axes = _figure(len(models), (4.4, 4.6))
    for place, (label, cells) in zip(axes, models.items(), strict=True):
        columns = 1 + max(c["column"] for c in cells)
        values = [c["kept"] for c in cells]
        image = [values[i : i + columns] for i in range(0, len(values), columns)]
        place.imshow(image, cmap="Greys", vmin=0, vmax=max(*values, 1e-9), aspect="auto")
        kept = sum(values) / len(values)
        place.set_title(f"{label}\n{kept:.1%} kept, {cells[0]['rows_alive']} of {cells[0]['out']} rows", fontsize=8)
        place.set(xlabel="in", ylabel="out", xticks=[], yticks=[])
    figure.suptitle(rows[0]["site"], fontsize=9)
    return figure


def allocation_figure(rows: TableRows) -> Figure:
    """Draw the metric over the share of the factors, one line per task and density (LoSparse's Figure 6)."""
    figure, (axes,) = _figure()
    lines = [{**r, "line": f"{r['task']}, density {r['density']:g}"} for r in rows]
    _curves(axes, lines, "low_rank", "metric", by="line")
    axes.set(xlabel="share of the factors in the dense parameters", ylabel="dev metric")
    axes.legend()
    return figure


FIGURES: dict[str, Callable[[TableRows], Figure]] = {
    "truncation": truncation_figure, "sweep": sweep_figure, "spectra": spectra_figure, "ranks": ranks_figure,
    "neurons": neurons_figure, "pattern": pattern_figure, "allocation": allocation_figure,
    "widths": lambda rows: width_figure(_by(rows, "model")),
}  # fmt: skip


def write_rows(kind: str, rows: TableRows, out: Path) -> None:
    """Write ``<kind>.csv`` and ``<kind>.png`` into the folder ``out``.

    Args:
        kind: a key of :data:`FIGURES`.
        rows: the table, at least one row.
        out: folder; files of an earlier analysis of this kind are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{kind}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    FIGURES[kind](rows).savefig(out / f"{kind}.png")
