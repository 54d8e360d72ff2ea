"""Models without values in the form after a method, to know their sizes before training.

Where data decide on widths and rows, these are spread evenly over the model, so that the number of weights is right and
their places are not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_compress.layers import LowRankLinear, LowRankRowsLinear
from lit_compress.models.cut import SUBLAYER_GATES, cut_closed
from lit_compress.models.prices import unit_prices
from lit_compress.models.sites import held_part, linear_at, of_kind, site_shapes, sublayers
from lit_compress.models.storage import tied
from lit_compress.models.surgery import replace
from lit_compress.numerics.ranks import stored
from lit_compress.numerics.search import largest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KINDS = ("attention", "ffn")
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.int32: "I32",
    torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


def file_bytes(net: PreTrainedModel) -> int:
    """Return the size of the ``model.safetensors`` that ``save_net`` writes for ``net``; only shapes are read."""
    aliases, end = tied(net), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = {name: value for name, value in net.state_dict().items() if name not in aliases}
    for name, value in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        start, end = end, end + value.numel() * value.element_size()
        dtype = _DTYPES.get(value.dtype, "BF16")
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + text + -text % 8 + end


def integer_bytes(net: PreTrainedModel, bits: int, graph: int) -> int:
    """Return about the size of a program of ``net`` with matrices and tables of integers; only shapes are read.

    Every row has a scale of 4 bytes; with 4 bits, tables have 8, and 64 weights share a scale of 2 bytes.

    Args:
        net: without values.
        bits: of the matrices' integers, 8 or 4.
        graph: bytes of the program next to its weights, for each matrix.
    """
    tables = {id(module.weight) for module in net.modules() if isinstance(module, nn.Embedding)}
    total = 0
    for value in {id(value): value for value in net.parameters()}.values():
        rows = value.numel() // max(1, value.shape[-1] if value.ndim else 1)
        if value.ndim < 2:
            total += 4 * value.numel()
        elif bits == 8 or id(value) in tables:
            total += value.numel() + 4 * rows + graph
        else:
            total += value.numel() // 2 + 2 * value.numel() // 64 + graph
    return total


def cut_evenly(
    net: PreTrainedModel, density: float, units: Collection[str] = ("heads", "neurons"), whole: bool = False
) -> PreTrainedModel:
    """Remove heads and neurons in place as :func:`spread_evenly` says, whose arguments these are; return ``net``."""
    left, z, prices = spread_evenly(net, density, units, whole), {}, unit_prices(net, sublayers(net))
    for kind, (layer, unit) in SUBLAYER_GATES.items():
        if group := [part for part in of_kind(sublayers(net), kind) if part.last in left]:
            z[unit] = torch.stack([(torch.arange(prices[part.last].count) < left[part.last]).float() for part in group])
            if whole:
                z[layer] = torch.ones(len(group), 1)  # closes with the last of its units
    cut_closed(net, z, constant=whole)
    return net


def spread_evenly(
    net: PreTrainedModel, density: float, units: Collection[str] = ("heads", "neurons"), whole: bool = False
) -> dict[str, int]:
    """Return by last matrix how many units are left if everywhere the same share goes, about ``density`` of the sites.

    Args:
        net: dense; only shapes are read.
        density: of the weights of the sites.
        units: ``heads``, ``neurons`` or both; where one of them stays whole, more of the other goes.
        whole: sub-layers may lose their last head or neuron, and are then removed (stages/units.py); else each keeps
            one.
    """
    parts = sublayers(net)
    prices = unit_prices(net, parts)
    left = {kind: sum(prices[part.last].whole for part in of_kind(parts, kind)) for kind in _KINDS}
    room, held, kept_units, done = density * sum(left.values()), held_part(parts), dict[str, int](), set[str]()
    for kind in _KINDS:  # heads are coarse: neurons make up for what their rounding leaves
        unit, group = SUBLAYER_GATES[kind][1], of_kind(parts, kind)
        if unit not in units or not group:
            continue
        cut = sum(left[k] for k in _KINDS if SUBLAYER_GATES[k][1] in units and k not in done)
        share = max(0.0, (room - sum(left.values()) + cut) / cut)
        counts = [prices[part.last].count for part in group]
        least = [0 if whole and part is not held else 1 for part in group]
        kept = [max(pair) for pair in zip(least, _spread(share, counts), strict=True)]
        kept_units |= {part.last: count for part, count in zip(group, kept, strict=True)}
        done.add(kind)
        left[kind] = left[kind] * sum(kept) // sum(counts)
    return kept_units


def _spread(share: float, counts: list[int]) -> list[int]:
    """Return a whole number for each of ``counts``, near ``share`` of it; their sum is near the sum of the shares."""
    kept, before, total = [], 0, 0.0
    for count in counts:
        total += share * count
        kept.append(min(count, int(total + 1e-9) - before))
        before += kept[-1]
    return kept


def keep_rows_evenly(
    net: PreTrainedModel, ranks: Mapping[str, int], budget: int, pivot: bool = False
) -> PreTrainedModel:
    """Give every site factors of its rank and the same share of its rows, so that ``budget`` weights are stored.

    Args:
        net: without values; changed in place.
        ranks: by site; 0 for rows alone.
        budget: weights of the sites, factors included.
        pivot: factors and rows are counted in pivot form.

    Returns:
        ``net``.
    """
    sizes = site_shapes(net)
    phases = {name: i / len(sizes) for i, name in enumerate(sizes)}  # not all matrices gain a row at the same share

    def rows(share: float) -> dict[str, int]:
        return {name: min(out, int(share * out + phases[name])) for name, (out, _) in sizes.items()}

    def size(kept: Mapping[str, int]) -> int:
        return sum(stored(*shape, ranks.get(name, 0), pivot, kept[name]) for name, shape in sizes.items())

    kept = rows(largest(lambda share: size(rows(share)) <= budget, 0.0, 1.0))
    if size(kept) > budget:
        kept = dict.fromkeys(sizes, 0)
    for name, (out, inner) in sizes.items():
        rank, bias = ranks.get(name, 0), linear_at(net, name).bias is not None
        if rank * (out + inner) + kept[name] * inner >= out * inner:
            continue
        with torch.device("meta"):
            rows = LowRankRowsLinear(inner, out, rank, kept[name], bias)
            replace(net, name, rows if kept[name] or not rank else LowRankLinear(inner, out, rank, bias))
    return net
