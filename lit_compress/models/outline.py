"""Sizes of models, found from shapes alone: of files and programs, of heads and neurons, of the form after a method.

Before training data have not decided on widths and rows. They are spread evenly over the model, so that the number of
weights is right and their places are not.

Models whose layers keep equal numbers of heads and neurons are ordinary models with another configuration. Which
numbers it has is in the record of the architecture. Where the width of a head follows from the width of hidden states
(BERT, GPT-2), heads stay, and neurons go alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_compress.layers import LowRankLinear, LowRankRowsLinear
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.architectures import get_architecture
from lit_compress.models.cut import SUBLAYER_GATES, cut_units
from lit_compress.models.sites import (
    Model,
    SubLayer,
    embedding_params,
    head_width,
    held_part,
    module_at,
    of_kind,
    site_shapes,
    size_at,
    sublayers,
)
from lit_compress.models.storage import tied
from lit_compress.models.surgery import as_linears, describe, empty_parameters, replace
from lit_compress.numerics.ranks import stored
from lit_compress.numerics.search import largest
from lit_compress.numerics.structures import uniform_options
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Config

LayerShape = Literal["free", "uniform"]  # of a compressed model: whether all layers have the same numbers of units
_KINDS = ("attention", "ffn")
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.int32: "I32",
    torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


def file_bytes(net: Model) -> int:
    """Return the size of the ``model.safetensors`` that ``save_net`` writes for ``net``."""
    aliases, end = tied(net), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = {name: value for name, value in net.state_dict().items() if name not in aliases}
    for name, value in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        start, end = end, end + value.numel() * value.element_size()
        dtype = _DTYPES.get(value.dtype, "BF16")
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + text + -text % 8 + end


def estimated_bytes(net: Model, bits: int, graph: int) -> int:
    """Return about the size of a program of ``net``, whose matrices and tables have weights of 32, 8 or 4 ``bits``.

    With 8 bits, every row has a scale of 4 bytes; with 4, 32 weights share a scale of 2 bytes, and tables and a tenth
    of the matrices have 8 bits.
    ``graph`` is the bytes of the program next to its weights, for each matrix.
    """

    def size(value: Tensor) -> int:
        low = max(bits, 8) if id(value) in tables else bits
        if value.ndim < 2 or low == 32:
            return value.numel() * (4 if value.is_floating_point() else value.element_size())
        in_8_bits = value.numel() + 4 * len(value)
        return in_8_bits if low == 8 else (9 * (value.numel() // 2 + 2 * value.numel() // 32) + in_8_bits) // 10

    tables = {id(table) for table in embedding_params(net)}
    values = {id(value): value for value in net.parameters()}.values()
    return sum(map(size, values)) + graph * sum(value.ndim > 1 for value in values)


def cut_evenly(net: Model, density: float) -> Model:
    """Remove heads and neurons in place as :func:`spread_evenly` says, whose arguments these are; return ``net``."""
    left = spread_evenly(net, density)
    counts = {part.last: part.count(net) for part in sublayers(net, gated=False)}
    cut_units(net, {name: torch.arange(counts[name]) < count for name, count in left.items()}, whole=True)
    return net


def spread_evenly(net: Model, density: float) -> dict[str, int]:
    """Return by last matrix how many units are left if everywhere the same share goes, about ``density`` of the sites.

    If heads cannot go, more neurons go. Sub-layers may lose their last unit, and are then removed (stages/units.py).
    """
    units = ("heads", "neurons") if get_architecture(net).cuts_heads else ("neurons",)
    parts = sublayers(net, gated=False)
    left = {kind: sum(part.weights(net) for part in of_kind(parts, kind)) for kind in _KINDS}
    room, held, kept_units, done = density * sum(left.values()), held_part(parts), dict[str, int](), set[str]()
    for kind in _KINDS:  # heads are coarse: neurons make up for what their rounding leaves
        unit, group = SUBLAYER_GATES[kind][1], of_kind(parts, kind)
        if unit not in units or not group:
            continue
        cut = sum(left[k] for k in _KINDS if SUBLAYER_GATES[k][1] in units and k not in done)
        share = max(0.0, (room - sum(left.values()) + cut) / cut)
        counts = [part.count(net) for part in group]
        least = [int(part is held) for part in group]
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


def keep_rows_evenly(net: Model, ranks: Mapping[str, int], budget: int) -> Model:
    """Give every site factors of its rank and the same share of its rows, in place; return ``net``.

    ``ranks`` are by site, 0 for rows alone; ``budget`` is the weights that are stored, factors included.
    """
    sizes = site_shapes(net)
    phases = {name: i / len(sizes) for i, name in enumerate(sizes)}  # not all matrices gain a row at the same share

    def rows(share: float) -> dict[str, int]:
        return {name: min(out, int(share * out + phases[name])) for name, (out, _) in sizes.items()}

    def size(kept: Mapping[str, int]) -> int:
        return sum(stored(*shape, ranks.get(name, 0), kept[name]) for name, shape in sizes.items())

    kept = rows(largest(lambda share: size(rows(share)) <= budget, 0.0, 1.0))
    if size(kept) > budget:
        kept = dict.fromkeys(sizes, 0)
    for name, (out, inner) in sizes.items():
        rank, bias = ranks.get(name, 0), module_at(net, name, nn.Linear).bias is not None
        if rank * (out + inner) + kept[name] * inner >= out * inner:
            continue
        with torch.device("meta"):
            rows = LowRankRowsLinear(inner, out, rank, kept[name], bias)
            replace(net, name, rows if kept[name] or not rank else LowRankLinear(inner, out, rank, bias))
    return net


@dataclass(frozen=True)
class UniformGroup:
    """Sub-layers whose number of ``units`` is one number of the configuration.

    ``counts`` may be kept, rising; ``price`` is the weights that a unit has in all parts.
    """

    parts: tuple[SubLayer, ...]
    units: int
    counts: tuple[int, ...]
    price: int

    @property
    def removed(self) -> torch.Tensor:
        """How many units go from each part for every count, int64 [counts]."""
        return self.units - torch.tensor(self.counts)


def uniform_groups(net: Model, step: int = 1) -> list[UniformGroup]:
    """Return the groups of sub-layers of the dense ``net`` that may lose units, neurons in steps of ``step``.

    Raises:
        UserError: the configuration of its architecture has none of these numbers.
    """
    record, groups = get_architecture(net), list[UniformGroup]()
    for field, parts in _by_field(net).items():
        units = parts[0].count(net)
        counts = tuple(range(step, units, step))
        if field in record.heads_fields:
            counts = tuple(count for count in range(1, units) if _resized(net, _heads(net, parts[0], count)))
        groups.append(UniformGroup(tuple(parts), units, (*counts, units), sum(part.price(net) for part in parts)))
    if not groups:
        raise UserError(
            f"model.shape: 'uniform' is not for '{net.config.model_type}', whose configuration has no number of "
            "neurons; nearest: free"
        )
    return groups


def even_counts(
    net: Model, density: float, step: int = 1, loss: Callable[[UniformGroup], Tensor] | None = None
) -> dict[str, int]:
    """Return by last matrix how many units each sub-layer keeps; the ones of the smallest ``loss``.

    ``density``, of the weights of all sites of the dense ``net``, is not exceeded; neurons go in steps of ``step``.
    ``loss`` returns the loss of every count of a group, float64 [counts]; None: near the same share of heads and of
    neurons is kept.

    Raises:
        UserError: so few weights are not possible, or :func:`uniform_groups`.
    """
    groups, total = uniform_groups(net, step), dense_site_params(net)
    savings = [(group.price * group.removed).double() for group in groups]
    losses = [
        saving * group.removed / group.units if loss is None or len(group.counts) == 1 else loss(group)
        for saving, group in zip(savings, groups, strict=True)
    ]
    options = uniform_options(losses, savings, (1 - density) * total)
    if options is None:
        least = 1 - sum(float(saving.max()) for saving in savings) / total
        raise UserError(
            f"model.density: {density:.4g} cannot be reached with model.shape uniform, which leaves every layer of "
            f"'{net.config.model_type}' heads and neurons; the smallest is {least + 5e-5:.4f}"
        )
    pairs = zip(groups, options, strict=True)
    return {part.last: group.counts[option] for group, option in pairs for part in group.parts}


def ordinary_form(net: Model) -> Model | None:
    """Return the model of the library's own class that has the matrices of the fused ``net``, without values.

    None if there is none: ``net`` has layers of another kind, of different sizes or of none, or more biases.
    """
    if any(spec["kind"] != "sized" for spec in describe(net).values()):
        return None
    record, sizes = get_architecture(net), dict[str, int]()
    for field, parts in _by_field(net).items():
        widths = {size_at(net, part.last)[1] for part in parts}
        if len(widths) > 1 or 0 in widths:  # without heads or neurons it is no model of the family
            return None
        if field not in record.heads_fields:
            sizes[field] = widths.pop()
        elif (queries := widths.pop() // head_width(net, "decoder")) != getattr(net.config, field):
            sizes |= _heads(net, parts[0], queries * parts[0].heads // getattr(net.config, field))
    if (config := _resized(net, sizes)) is None:
        return None
    with empty_parameters():
        ordinary = as_linears(type(net)(config))
        ordinary.tie_weights()
    own, others = ({name: value.shape for name, value in of.named_parameters()} for of in (net, ordinary))
    return ordinary.eval() if own == others else None


def _by_field(net: Model) -> dict[str, list[SubLayer]]:
    """Return field of the configuration -> the sub-layers whose number of units it is."""
    record, by_field = get_architecture(net), dict[str, list[SubLayer]]()
    fields = {"ffn": record.neurons_field, "attention": next(iter(record.heads_fields), None)}
    for part in sublayers(net, removable=False):
        if field := fields[part.kind]:
            by_field.setdefault(field.format(stack=part.stack), []).append(part)
    return by_field


def _heads(net: Model, part: SubLayer, count: int) -> dict[str, int]:
    """Return the fields of a model whose attentions keep ``count`` heads of keys, with the queries of each."""
    queries, keys = get_architecture(net).heads_fields
    of_each = getattr(net.config, queries) // part.heads
    return {queries: count * of_each, keys: count, "head_dim": head_width(net, "decoder")}


def _resized(net: Model, sizes: dict[str, Any]) -> Config | None:
    """Return the configuration of ``net`` with other numbers; None if its class refuses them."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return type(net.config).from_dict(net.config.to_dict() | sizes)
    except (StrictDataclassError, ValueError):
        return None
