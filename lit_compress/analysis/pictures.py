"""The table and the figure of a compressed model: densities and ranks by layer and role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_compress.layers import LowRankLinear, StackedLowRankLinear
from lit_compress.models.accounting import dense_layers, dense_sites, weights
from lit_compress.models.sites import find_sites

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel


def site_table(net: PreTrainedModel, before: PreTrainedModel | None = None) -> list[dict[str, Any]]:
    """Return for every site its name, role, layer, the rank of its factors (None if dense) and its density.

    A site of a removed sub-layer has rank None and density 0.

    Args:
        net: compressed.
        before: the dense model; without it, the sizes in the configuration of ``net``; an ordinary model of a smaller
            size does not have them.
    """
    whole = net if before is None else before
    table, dense, left = [], dense_layers(whole), {site.name for site in find_sites(net)}
    for site in dense_sites(whole):
        if site.name not in left:
            table.append({"name": site.name, "role": site.role, "layer": site.layer, "rank": None, "density": 0.0})
            continue
        module = net.get_submodule(site.name)
        kept = sum(int(torch.count_nonzero(w)) for w in weights(module))
        table.append(
            {
                "name": site.name, "role": site.role, "layer": site.layer,
                "rank": module.rank if isinstance(module, LowRankLinear | StackedLowRankLinear) else None,
                "density": kept / dense[site.name].weight.numel(),
            }
        )  # fmt: skip
    return table


def structure_figure(net: PreTrainedModel, title: str) -> Figure:
    """Draw a grid of layers and roles with the ranks of factorized sites; without any, with densities."""
    from matplotlib.figure import Figure

    table = site_table(net)
    roles = list(dict.fromkeys(row["role"] for row in table))
    layers = 1 + max(row["layer"] for row in table)
    ranks = any(row["rank"] for row in table)
    taken = {(row["layer"], row["role"]) for row in table if not row["density"]}
    grid = torch.full((layers, len(roles)), torch.nan)
    figure = Figure(figsize=(1.2 + 0.9 * len(roles), 1.2 + 0.45 * layers), layout="constrained")
    axes = figure.subplots()
    for row in table:
        value = row["rank"] if ranks else row["density"]
        grid[row["layer"], roles.index(row["role"])] = torch.nan if value is None else value
    top = None if ranks else 1.0
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=top)
    for layer in range(layers):
        for column in range(len(roles)):
            value = float(grid[layer, column])
            gone = value != value and (layer, roles[column]) in taken
            label = "gone" if gone else "dense" if value != value else f"{value:.0f}" if ranks else f"{value:.2f}"
            bright = value == value and value > 0.6 * (top or float(grid.nan_to_num().max()))
            axes.text(column, layer, label, ha="center", va="center", fontsize=8, color="black" if bright else "white")
    axes.set(xticks=range(len(roles)), xticklabels=roles, yticks=range(layers), ylabel="layer", title=title)
    figure.colorbar(image, label="rank" if ranks else "density")
    return figure
