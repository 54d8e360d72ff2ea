"""Figures of a compressed model: densities and ranks by layer and role, heads and neurons left, a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_compress.layers import LowRankLinear, LowRankRowsLinear, StackedLowRankLinear
from lit_compress.models.accounting import dense_layers, dense_sites, weights
from lit_compress.models.sites import find_sites, of_kind, size_at, stream_width, sublayers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel


_CUT = {"nothing", "sized", "sized_norm"}  # kinds of layers of a model that lost heads, neurons, dimensions, sub-layers


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


def units_figure(net: PreTrainedModel, title: str) -> Figure:
    """Draw the heads and neurons left in every layer; there is no bar where a sub-layer was removed."""
    from matplotlib.figure import Figure

    left = {site.name for site in find_sites(net)}
    parts = sublayers(net)
    figure = Figure(figsize=(2 + 0.45 * len(parts), 3.2), layout="constrained")
    for axes, kind, role in zip(figure.subplots(1, 2), ("attention", "ffn"), ("o", "down"), strict=True):
        names = [part.sites[role] for part in of_kind(parts, kind)]
        inputs = [size_at(net, name)[1] if name in left else 0 for name in names]
        width = net.config.hidden_size // net.config.num_attention_heads if kind == "attention" else 1
        counts = [number // width for number in inputs]
        axes.bar(range(len(counts)), counts)
        for layer, count in enumerate(counts):
            axes.text(layer, count, str(count), ha="center", va="bottom", fontsize=7)
        axes.set(xlabel="layer", xticks=range(len(counts)), title="heads" if kind == "attention" else "neurons")
    figure.suptitle(f"{title}: {stream_width(net)} of {net.config.hidden_size} hidden dimensions")
    return figure


def _kept(layer: Any) -> torch.Tensor:
    """Return which weights of a matrix (of the sparse matrix, if there are factors) are not 0, bool [out, in]."""
    if not isinstance(layer, LowRankRowsLinear):
        return layer.weight != 0
    kept = torch.zeros(layer.out_features, layer.in_features, dtype=torch.bool)
    kept[layer.index.long()] = layer.right[layer.rank :] != 0
    return kept


def mask_figure(net: PreTrainedModel, title: str) -> Figure:
    """Draw which weights of the first layer's attention output, or else first site, are kept (LPAF's Figure 3).

    Dark is kept. A cell of 4 x 4 weights shows the fraction kept, so that empty rows can be seen.
    """
    from matplotlib.figure import Figure
    from torch.nn.functional import avg_pool2d

    sites = find_sites(net)
    site = next((site for site in sites if site.role == "o"), sites[0])
    module = net.get_submodule(site.name)
    kept = _kept(module).float()
    figure = Figure(figsize=(5, 5.4), layout="constrained")
    axes = figure.subplots()
    cells = avg_pool2d(kept[None], 4)[0]
    axes.imshow(
        cells, cmap="Greys", vmin=0, vmax=max(float(cells.max()), 1e-9), extent=(0, kept.shape[1], kept.shape[0], 0)
    )
    rows = int((kept.sum(1) > 0).sum())
    axes.set(
        title=f"{title}: {site.name}\n{float(kept.mean()):.1%} kept, {rows} of {len(kept)} rows not zero",
        xlabel="in",
        ylabel="out",
    )
    return figure
