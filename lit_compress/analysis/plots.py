"""The tables of ``truncation.py`` as figures, and all of it as files: CSV, PNG and TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.surgery import atomic_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lit_compress.analysis.truncation import Rows


def _figure(columns: int = 1, size: tuple[float, float] = (6.4, 4.2)) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1]), layout="constrained", dpi=120)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _by(rows: Rows, key: str) -> dict[Any, Rows]:
    return {value: [r for r in rows if r[key] == value] for value in dict.fromkeys(r[key] for r in rows)}


def _curves(axes: Axes, rows: Rows, x: str, y: str, marker: str = "o", by: str = "weighting") -> None:
    for label, group in _by(rows, by).items():
        axes.plot([r[x] for r in group], [r[y] for r in group], marker=marker, markersize=4, label=label)
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    axes.grid(alpha=0.3)


def truncation_figure(rows: Rows) -> Figure:
    """Draw the drop, the reconstruction error and the mean singular value of every group."""
    figure, (drop, error, sigma) = _figure(3, (4.6, 3.8))
    labels = _by(rows, "weighting")
    width = 0.8 / len(labels)
    for i, (label, group) in enumerate(labels.items()):
        drop.bar([r["group"] - 0.4 + (i + 0.5) * width for r in group], [r["drop"] for r in group], width, label=label)
    drop.set(xlabel="group of components taken away", ylabel="drop of the dev metric", xticks=range(1, 11))
    drop.axhline(0, color="black", linewidth=0.6)
    drop.legend()
    _curves(error, rows, "group", "error")
    error.set(ylabel="reconstruction error, mean over matrices")
    _curves(sigma, rows, "group", "sigma")
    sigma.set(yscale="log", ylabel="mean singular value (weighted)")
    return figure


def sweep_figure(rows: Rows) -> Figure:
    """Draw the dev metric over the ratio of ranks kept."""
    figure, (axes,) = _figure()
    _curves(axes, rows, "rank_ratio", "metric")
    axes.set(ylabel="dev metric, no retraining", xlabel="ratio of ranks kept")
    axes.legend()
    return figure


def spectra_figure(rows: Rows) -> Figure:
    """Draw the singular values of every site, each divided by its largest, and their energy."""
    labels = _by(rows, "weighting")
    figure, axes = _figure(len(labels), (5.2, 4.0))
    for place, (label, group) in zip(axes, labels.items(), strict=True):
        for site in _by(group, "site").values():
            place.plot([r["index"] for r in site], [r["sigma"] / site[0]["sigma"] for r in site], linewidth=0.7)
        place.set(title=label, xlabel="component", ylabel="singular value / largest", yscale="log")
        place.grid(alpha=0.3)
    return figure


def ranks_figure(rows: Rows) -> Figure:
    """Draw rank / full rank of every site by layer, one line a role."""
    figure, (axes,) = _figure()
    shares = [{**r, "rank / full rank": r["rank"] / min(r["out"], r["in"])} for r in rows]
    _curves(axes, shares, "layer", "rank / full rank", by="role")
    mean = sum(r["rank"] for r in rows) / len(rows)
    axes.set(ylim=(0, 1.05), title=f"mean rank {mean:.1f}")
    axes.legend(ncols=3)
    return figure


FIGURES: dict[str, Callable[[Rows], Figure]] = {
    "truncation": truncation_figure, "sweep": sweep_figure, "spectra": spectra_figure, "ranks": ranks_figure,
}  # fmt: skip


def write_rows(kind: str, rows: Rows, out: Path) -> None:
    """Write ``<kind>.csv``, ``<kind>.png`` and TensorBoard events into the folder ``out``, which is made anew.

    Args:
        kind: a key of :data:`FIGURES`.
        rows: of one table, at least one.
        out: folder; what an earlier analysis left there is replaced.
    """
    from torch.utils.tensorboard import SummaryWriter

    figure = FIGURES[kind](rows)
    with atomic_folder(out) as folder:
        with (folder / f"{kind}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        figure.savefig(folder / f"{kind}.png")
        events = SummaryWriter(str(folder))
        events.add_figure(kind, figure)
        events.add_text(kind, _markdown(rows[:200]))
        events.close()


def _markdown(rows: Rows) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
