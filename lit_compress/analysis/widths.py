"""What SP3 left of every layer (the paper's Figures 4, 6, 7), and the principal components it chose from (Figure 1)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration import COMPONENTS
from lit_compress.layers import NarrowLinear, NarrowNorm
from lit_compress.projected import head_count, layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from lit_compress.callbacks import RunLogger


_PANELS = (
    ("hidden states", {"hidden_attention": "after attention", "hidden_ffn": "after FFN"}),
    ("directions", {"ffn": "FFN", "qk": "Q, K", "vo": "V, O"}),
    ("heads", {"heads": "heads"}),
)


def is_narrow(net: PreTrainedModel) -> bool:
    """Whether ``net`` is what SP3 leaves."""
    return any(isinstance(module, NarrowLinear) for module in net.modules())


def width_table(net: PreTrainedModel) -> list[dict[str, Any]]:
    """Return per block the fraction that is left: hidden_attention, hidden_ffn, ffn, qk, vo, heads; 0 in dead parts."""
    parts, d, heads = layout(net), net.config.hidden_size, head_count(net)
    table = []
    for i, names in enumerate(parts.blocks):
        q, v, up = (net.get_submodule(names[role]) for role in ("q", "v", "up"))
        sites = [net.get_submodule(name) for name in parts.norms[2 * i + 1 : 2 * i + 3]]
        hidden = [site.features / d if isinstance(site, NarrowNorm) else 1.0 for site in sites]
        row = {"layer": i, "hidden_attention": hidden[0], "hidden_ffn": hidden[1]}
        neurons = getattr(net.config, "intermediate_size", None) or net.config.hidden_dim
        row["ffn"], row["heads"] = up.out_features / neurons, q.heads / heads
        width = max(q.heads, 1) * (d // heads)
        row["qk"], row["vo"] = (layer.out_features / width for layer in (q, v))
        table.append(row)
    return table


def width_figure(net: PreTrainedModel, title: str) -> Figure:
    """Draw, per layer, the fractions left of hidden states; FFN, Q/K and V/O; heads."""
    from matplotlib.figure import Figure

    table = width_table(net)
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, (name, columns) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        width = 0.8 / len(columns)
        for i, (column, label) in enumerate(columns.items()):
            places = [row["layer"] + (i - (len(columns) - 1) / 2) * width for row in table]
            axes.bar(places, [row[column] for row in table], width, label=label)
        axes.set(ylim=(0, 1), xlabel="layer", xticks=range(len(table)), title=name)
        axes.legend(fontsize=7)
    figure.suptitle(f"{title}: fraction left")
    return figure


def component_figure(shares: Tensor, title: str) -> Figure:
    """Draw the share of every principal component of every site.

    Args:
        shares: [sites, d], falling, rows sum to 1.
        title: of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    colours = torch.linspace(0, 0.9, len(shares)).tolist()
    import matplotlib

    for i, (row, colour) in enumerate(zip(shares, colours, strict=True)):
        ends = (0, len(shares) // 2, len(shares) - 1)
        axes.plot(row[:-1].clamp_min(1e-12), color=matplotlib.colormaps["viridis"](colour), linewidth=1,
                  label=f"site {i}" if i in ends else None)  # fmt: skip
    axes.set(yscale="log", xlabel="principal component", ylabel="share of the energy", title=title)
    axes.legend()
    return figure


def log_widths(logger: RunLogger, net: PreTrainedModel, folder: Path, stage: str, steps: int) -> None:
    """Show what is left of ``net`` in TensorBoard, and the components that stand in ``folder``; nothing for others."""
    if not is_narrow(net):
        return
    from safetensors.torch import load_file

    logger.experiment.add_figure("widths", width_figure(net, stage), logger.offset + steps)
    if (folder / COMPONENTS).is_file():
        shares = load_file(folder / COMPONENTS)["shares"]
        figure = component_figure(shares, "principal components by site")
        logger.experiment.add_figure("components", figure, logger.offset + steps)
