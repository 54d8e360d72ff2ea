"""Removal of heads and neurons: smaller Linears, with constant outputs of removed ones added to the next bias.

The Hugging Face code needs no change for this: it finds the number of heads from the width of the projections. Not so
in OPT, which has it as a number, and in T5, whose bias of relative positions has as many heads in every layer: there,
neurons are cut, heads stay. With grouped queries (Llama) the queries of a key go with it. Where one Linear is several
matrices (ModernBERT), all of them lose the same rows. The new sizes travel in the layers' specs (surgery.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import LAYERS, LowRankSparseLinear, SizedLinear
from lit_compress.models.architectures import get_architecture
from lit_compress.models.record import FEED_FORWARD, join_parts, parts_of, split_parts
from lit_compress.models.sites import find_sites, head_width, size_at
from lit_compress.models.surgery import fill, replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# tensors of a layer that have a row for every output, a column for every input
OUTPUTS, INPUTS = ("weight", "left", "sparse", "bias"), ("weight", "right", "sparse")


@torch.no_grad()
def slice_linear(linear: Any, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Module:
    """Return a layer of the same kind with only some outputs and inputs of ``linear``; for a Linear a SizedLinear.

    Args:
        linear: a Linear or its training layer.
        rows: bool [out], the outputs to keep; None for all.
        columns: bool [in], the inputs to keep; None for all.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in linear.named_parameters(recurse=False):
        if rows is not None and name in OUTPUTS:
            tensor = tensor[rows]
        if columns is not None and name in INPUTS:
            tensor = tensor[:, columns]
        tensors[name] = tensor
    if isinstance(linear, nn.Linear):
        return SizedLinear.from_tensors(tensors["weight"], tensors.get("bias"))
    spec = linear.spec()
    kind = LAYERS[spec.pop("kind")]
    if rows is not None:
        spec["out_features"] = int(rows.sum())
    if columns is not None:
        spec["in_features"] = int(columns.sum())
    layer = kind(**spec)
    fill(layer, **tensors)
    return layer


@torch.no_grad()
def add_constant(linear: Any, columns: Tensor, value: Tensor) -> None:
    """Add to the bias of ``linear`` its outputs for the inputs ``columns`` (bool [in]) at constant ``value``."""
    if linear.bias is None and not value.any():
        return
    x = value.new_zeros(len(columns))
    x[columns] = value
    linear.bias = nn.Parameter(linear(x))


def remove_constant_units(net: PreTrainedModel) -> set[str]:
    """Remove the heads and neurons of ``net`` whose output does not depend on the input, in place.

    A neuron whose row of the first FFN matrix is zero always gives act(bias); with a gate, act(gate) * up, one constant
    factor is enough if it is 0. A head whose rows of the value matrix are all zero always gives their bias, since
    attention weights sum to 1 (in evaluation mode, without dropout on them). Only matrices without factors have such
    rows. If all heads are constant, one stays, with zeros for weights.

    Returns:
        The names of the layers that have become smaller.
    """
    architecture, cut = get_architecture(net), set[str]()
    for names, width in sublayer_roles(net):
        if width:
            cut |= _cut_heads(net, names, width)
        elif architecture.activation:
            cut |= _cut_neurons(net, names, architecture.activation)
    return cut


def sublayer_roles(net: PreTrainedModel) -> Iterator[tuple[dict[str, str], int]]:
    """Yield the sub-layers that can lose constant heads or neurons: {role: site}, and the width of a head.

    The width is 0 for feed-forward networks.
    """
    parts: dict[tuple[str, int, bool], dict[str, str]] = {}
    for site in find_sites(net):
        parts.setdefault((site.stack, site.layer, site.cross), {})[site.role] = site.name
    architecture = get_architecture(net)
    for (stack, *_), names in parts.items():
        if architecture.activation and "down" in names:
            yield {role: name for role, name in names.items() if role in FEED_FORWARD}, 0
        if architecture.removes_heads and "o" in names:
            yield {role: name for role, name in names.items() if role not in FEED_FORWARD}, head_width(net, stack)


def _dead_rows(linear: nn.Module) -> Tensor | None:
    """Return which outputs are constant, bool [out]; None for layers with factors and for ordinary Linears."""
    if not isinstance(linear, LowRankSparseLinear) or linear.rank:
        return None
    return ~linear.sparse.ne(0).any(1)


def _bias(linear: Any) -> Tensor:
    return linear.bias if linear.bias is not None else torch.zeros(linear.out_features)


@torch.no_grad()
def _cut_neurons(net: PreTrainedModel, names: dict[str, str], activation: str) -> set[str]:
    from transformers.activations import ACT2FN

    roles = [role for role in ("gate", "up", "gate_up") if role in names]
    firsts, down = [net.get_submodule(names[role]) for role in roles], net.get_submodule(names["down"])
    rows = [dead for linear in firsts if (dead := _dead_rows(linear)) is not None]
    if len(rows) < len(firsts):
        return set()
    shape = sum(len(parts_of(role)) for role in roles), size_at(net, names["down"])[1]
    constant, values = (torch.cat(of).view(shape) for of in (rows, [_bias(linear) for linear in firsts]))
    values[0] = ACT2FN[getattr(net.config, activation)](values[0])
    dead = constant.all(0) | (constant & (values == 0)).any(0)
    if not dead.any():
        return set()
    add_constant(down, dead, values.prod(0)[dead])
    for role, linear in zip(roles, firsts, strict=True):
        replace(net, names[role], slice_linear(linear, rows=(~dead).repeat(len(parts_of(role)))))
    replace(net, names["down"], slice_linear(down, columns=~dead))
    return {names[role] for role in (*roles, "down")}


@torch.no_grad()
def _cut_heads(net: PreTrainedModel, names: dict[str, str], width: int) -> set[str]:
    firsts = [role for role in names if {"q", "k", "v"} & {*parts_of(role)}]
    last = firsts[-1]
    v, o = (net.get_submodule(names[role]) for role in (last, "o"))
    rows = _dead_rows(v)
    dead = split_parts(last, rows, width)[-1].view(-1, width).all(1) if rows is not None else None
    if dead is None or not dead.any():
        return set()

    def outputs(heads: Tensor, queries: int = 1) -> Tensor:
        return heads.repeat_interleave(queries).repeat_interleave(width)

    queries = size_at(net, names["o"])[1] // (len(dead) * width)  # heads of q that read the same one of k and v
    value = split_parts(last, _bias(v), width)[-1].view(-1, width).repeat_interleave(queries, 0).flatten()
    add_constant(o, outputs(dead, queries), value[outputs(dead, queries)])
    if dead.all():  # the reshaping to heads needs one; all its weights are zero from here on
        for role in (*firsts, "o"):
            linear = net.get_submodule(names[role])
            own = [(name, tensor) for name, tensor in linear.named_parameters(recurse=False) if name != "bias"]
            fill(linear, **{name: torch.zeros_like(tensor) for name, tensor in own})
        dead[0] = False
    for role in firsts:
        kept = ~outputs(dead, queries if role == "q" else 1)
        kept = join_parts(role, [kept] * len(parts_of(role)), width)
        replace(net, names[role], slice_linear(net.get_submodule(names[role]), rows=kept))
    replace(net, names["o"], slice_linear(o, columns=~outputs(dead, queries)))
    return {names[role] for role in (*firsts, "o")}
