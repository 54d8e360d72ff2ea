"""Figures of matplotlib: the structure of a model, metrics against costs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.layers import LowRankLinear
from lit_compress.models.accounting import dense_layers, dense_sites, weights
from lit_compress.models.sites import Model, find_sites
from lit_compress.run.results import front

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {"bytes": ("MB on disk", 1e-6), "latency": ("CPU latency of one text, ms", 1.0)}  # cost -> label, its unit


def looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return ``color`` and ``marker`` of every label for matplotlib; 50 are different."""
    names = dict.fromkeys(labels)
    return {name: {"color": f"C{n % 10}", "marker": "os^Dv"[(n + n // 10) % 5]} for n, name in enumerate(names)}


def _plain(text: str) -> str:
    """Return a text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def as_svg(figure: Figure) -> str:
    """Return a figure as SVG, the same text from the same numbers; its background is transparent."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lit_compress"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def site_table(net: Model) -> list[dict[str, Any]]:
    """Return for every site its name, its place (layer, role), the rank of its factors (None if dense), its density.

    A site of a removed sub-layer has density 0.
    """
    table, dense, left = [], dense_layers(net), {site.name for site in find_sites(net)}
    sites = dense_sites(net)
    stacks = len({site.stack for site in sites}) > 1
    for site in sites:
        module = net.get_submodule(site.name) if site.name in left else torch.nn.Identity()
        rank = module.rank if isinstance(module, LowRankLinear) else None
        share = sum(int(torch.count_nonzero(w)) for w in weights(module)) / dense[site.name].weight.numel()
        place = f"{site.stack} {site.layer}" if stacks else f"{site.layer}", f"{site.role}{' cross' * site.cross}"
        table.append({"name": site.name, "place": place, "rank": rank, "density": share})
    return table


def structure_figure(layers: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """Draw the grid of a :func:`site_table`: the colour is the density, the text the rank of the factors if any."""
    from matplotlib.figure import Figure

    names, roles = (list(dict.fromkeys(names)) for names in zip(*(row["place"] for row in layers), strict=True))
    grid = torch.full((len(names), len(roles)), torch.nan)
    figure = Figure(figsize=(1.4 + 0.7 * len(roles), 0.8 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for row in layers:
        name, role = row["place"]
        x, y, share = roles.index(role), names.index(name), row["density"]
        grid[y, x] = share
        text = f"r {row['rank']}" if row.get("rank") else "gone" if not share else f"{share:.0%}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if share > 0.6 else "black")
    image = axes.imshow(grid, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    axes.set(xticks=range(len(roles)), yticks=range(len(names)), ylabel="layer", title=_plain(title))
    axes.set_xticklabels(map(_plain, roles))
    axes.set_yticklabels(map(_plain, names))
    figure.colorbar(image, label="density")
    return figure


def pareto_figure(groups: Sequence[dict[str, Any]], dense: dict[str, Any], metric: str, mode: str) -> Figure:
    """Return a figure of the metric against megabytes and milliseconds.

    A hollow mark is at chance. Models far behind, which would squeeze the others, are only named: below three quarters
    of the dense model's metric, or above three times of it.

    Args:
        groups: ``label``, ``mean``, ``bar`` (half the error bar, or None), ``costs`` {name: mean} and, if it is at
            chance, ``chance``.
        dense: ``mean`` and ``costs`` of the dense model, which is a star, its metric a dashed line.
        metric: label of the vertical axis.
        mode: ``max`` if more is better.
    """
    from matplotlib.figure import Figure

    styles = looks(group["label"] for group in groups)
    columns = max(1, min(5, 150 // (9 + max(map(len, styles), default=1))))
    figure = Figure(figsize=(9.6, 4.2 + 0.18 * (len(styles) // columns + 1)), layout="constrained", dpi=120)
    panels = figure.subplots(1, 2, sharey=True)
    lowest, highest = (0.75 * dense["mean"], inf) if mode == "max" else (-inf, 3 * dense["mean"])
    near = [group for group in groups if lowest <= group["mean"] <= highest]
    near = near if near and dense["mean"] > 0 else list(groups)
    far = [group for group in groups if group not in near]
    for axes, (cost, (label, unit)) in zip(panels, PANELS.items(), strict=True):
        places = [(group["costs"][cost] * unit, group) for group in near if group["costs"].get(cost)]
        for name in dict.fromkeys(group["label"] for _, group in places):
            style, own = styles[name], [place for place in places if place[1]["label"] == name]
            own.sort(key=lambda place: place[0])
            for x, group in own:
                axes.errorbar(
                    x, group["mean"], group["bar"] or 0, capsize=2, elinewidth=0.8, markersize=6, label=_plain(name),
                    **style, markerfacecolor="white" if group.get("chance") else style["color"],
                )  # fmt: skip
            axes.plot([x for x, _ in own], [group["mean"] for _, group in own], color=style["color"], linewidth=1)
        best = front([(x, group["mean"]) for x, group in places], mode)
        axes.step([x for x, _ in best], [y for _, y in best], where="post", color="0.6", linestyle=":", zorder=0)
        axes.axhline(dense["mean"], color="0.5", linewidth=0.8, linestyle="--", zorder=0)
        if whole := dense["costs"].get(cost):
            axes.plot(whole * unit, dense["mean"], "*", color="0.15", markersize=11, label="dense")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(_plain(metric))
    entries = {name: mark for axes in panels for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if entries:
        figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    if far:
        words = ", ".join(f"{group['label']} {group['mean']:.3g}" for group in far[:6]) + " ..." * (len(far) > 6)
        figure.suptitle(_plain(f"not drawn, far behind: {words}"), fontsize=8)
    return figure
