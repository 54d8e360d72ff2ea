"""Figures of SP3's models: fractions left in every block (the paper's Figures 4, 6, 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_compress.layers import NarrowNorm
from lit_compress.models.accounting import dense_layers
from lit_compress.models.record import parts_of
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import size_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel


# title of a panel, {column of the table: label}; _cross: a decoder's attention over the encoder's states
_PANELS = (
    ("hidden states", {"hidden_attention": "after attention", "hidden_cross": "after cross-attention",
                       "hidden_ffn": "after FFN"}),
    ("directions", {"ffn": "FFN", "qk": "Q, K", "vo": "V, O", "qk_cross": "Q, K, cross", "vo_cross": "V, O, cross"}),
    ("heads", {"heads": "heads", "heads_cross": "heads, cross"}),
)  # fmt: skip


def width_table(net: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the fractions left in every block: hidden_attention, hidden_ffn, ffn, qk, vo, heads.

    A removed sub-layer has 0. A decoder after an encoder also has hidden_cross, qk_cross, vo_cross, heads_cross.
    """
    stream, d, dense = residual_stream(net), net.config.hidden_size, dense_layers(net)
    rows: dict[str, dict[str, Any]] = {}
    for sublayer in stream.sublayers:
        row = rows.setdefault(sublayer.block, {"layer": len(rows)})
        site = net.get_submodule(stream.sites[sublayer.writes].norms[0])
        row[f"hidden_{sublayer.type}"] = site.features / d if isinstance(site, NarrowNorm) else 1.0
        if sublayer.kind == "ffn":
            down = sublayer.sites["down"]
            row["ffn"] = size_at(net, down)[1] / dense[down].in_features
            continue
        end, heads = "_cross" if sublayer.type == "cross" else "", net.config.num_attention_heads
        for column, role in (("qk", "q"), ("vo", "v")):
            name = next(name for own, name in sublayer.sites.items() if role in parts_of(own))
            layer = net.get_submodule(name)
            left = getattr(layer, "heads", 0) if getattr(layer, "side", "") else heads
            row[f"heads{end}"] = left / heads
            row[f"{column}{end}"] = size_at(net, name)[0] / max(left, 1) / (dense[name].out_features // heads)
    return list(rows.values())


def width_figure(tables: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw for every block the fractions left of hidden states; of FFN, Q/K and V/O; of heads.

    Args:
        tables: title -> table of :func:`width_table`; each is a row of panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3 * len(tables)), layout="constrained")
    for grid, (title, table) in zip(figure.subplots(len(tables), 3, squeeze=False), tables.items(), strict=True):
        grid[0].set_ylabel(f"{title}: fraction left")
        for axes, (name, columns) in zip(grid, _PANELS, strict=True):
            there = {column: label for column, label in columns.items() if any(column in row for row in table)}
            width = 0.8 / len(there)
            for i, (column, label) in enumerate(there.items()):
                rows = [row for row in table if column in row]
                places = [row["layer"] + (i - (len(there) - 1) / 2) * width for row in rows]
                axes.bar(places, [row[column] for row in rows], width, label=label)
            axes.set(ylim=(0, 1), xlabel="block", xticks=range(len(table)), title=name)
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(there))
    return figure
