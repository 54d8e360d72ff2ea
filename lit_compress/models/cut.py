"""Remove closed parts and constant ones: fold their values into the weights, slice matrices, remove sub-layers.

The values of open gates go into the rows of v (heads), the columns of the second feed-forward matrix (neurons), the
rows and biases of the last matrices (sub-layers, hidden), the embeddings' columns and every LayerNorm's weight and bias
(hidden). So the smaller model computes the same as the gated one, biases and residual stream included; folding the
stream's gates into the next matrices' columns, as CoFi's program does, would miss the residual sum and the biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.layers import LAYERS, LowRankSparseLinear, Removed, SizedEmbedding, SizedLinear, SizedNorm
from lit_compress.layers.training.gated import GatedLinear, GatedNorm
from lit_compress.models.architectures import get_architecture
from lit_compress.models.record import join_parts, parts_of, split_parts
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import Model, SubLayer, cuttable, has, is_removed, module_at, of_kind, size_at, sublayers
from lit_compress.models.surgery import fill, replace, set_attributes, spec_of, tell_heads

# type of sub-layer: its own gate, the gate of its units
SUBLAYER_GATES = {"attention": ("attention_layer", "heads"), "ffn": ("ffn_layer", "neurons")}
# tensors of a layer that have a row for every output, a column for every input
_OUTPUTS, _INPUTS = ("weight", "left", "sparse", "bias"), ("weight", "right", "sparse")


@torch.no_grad()
def close_empty_sublayers(z: dict[str, Tensor]) -> dict[str, Tensor]:
    """Close sub-layers without open units, and units of closed sub-layers, so that evaluation and export agree.

    A sub-layer whose units are all closed would still add its bias and be normalised. ``z`` is name of a gate -> values
    [groups, size]. A second call changes nothing.
    """
    z = dict(z)
    for layer, unit in SUBLAYER_GATES.values():
        if layer in z and unit in z:
            z[layer] = z[layer] * (z[unit] > 0).any(1, keepdim=True)
            z[unit] = z[unit] * (z[layer] > 0)
    return z


@torch.no_grad()
def cut_closed(net: Model, z: dict[str, Tensor]) -> None:
    """Remove the closed parts from ``net``, in place; its outputs equal the gated model's in evaluation mode.

    A closed sub-layer adds nothing, and the norm after it is also removed.

    Args:
        net: with or without the layers of :func:`~lit_compress.methods.cofi.gates.gate_net`.
        z: name of a gate -> deterministic values [groups, size].
    """
    z = {name: value.detach() for name, value in close_empty_sublayers(z).items()}
    for name, module in list(net.named_modules()):
        if isinstance(module, GatedLinear):
            replace(net, name, module.layer)
        elif isinstance(module, GatedNorm):
            replace(net, name, module.norm)
    parts, hidden = sublayers(net), z["hidden"][0] if "hidden" in z else None
    for kind, (gate, unit) in SUBLAYER_GATES.items():
        for group, part in enumerate(of_kind(parts, kind)):
            layer = z[gate][group] if gate in z else None
            if layer is not None and layer == 0:
                _take_out(net, part, constant=False)
            else:
                _cut(net, part, z[unit][group] if unit in z else None, layer, hidden)
    if hidden is not None:
        _cut_stream(net, hidden)
    _renumber(net)


@torch.no_grad()
def cut_units(net: Model, kept: Mapping[str, Tensor], whole: bool = False) -> None:
    """Remove heads and neurons of ``net``, in place, of any family; every attention keeps a head.

    With ``whole``, a sub-layer without units is removed: it still adds its last bias, with the norm after it. That is
    not for any family.

    ``kept`` is name of the Linear that reads the units of a sub-layer -> bool [units]; with grouped queries a unit is a
    head of keys and values with its queries. Other sub-layers, and models that share parameters, stay as they are.
    """
    for part in sublayers(net, removable=whole, gated=False) if kept else ():
        if part.last in kept:
            if whole and not kept[part.last].any():
                _take_out(net, part, constant=True)
            else:
                _cut(net, part, kept[part.last].float())
    if whole:
        _renumber(net)


def _renumber(net: Model) -> None:
    """Number the attentions that are left, as the key-value cache of generation counts them."""
    cached = [(part, is_removed(net, part)) for part in sublayers(net, gated=False) if part.cached]
    left = [part for part, removed in cached if not removed]
    for number, part in enumerate(left if len(left) < len(cached) else ()):
        set_attributes(net.get_submodule(part.module), {"layer_idx": number})


def _take_out(net: Model, part: SubLayer, constant: bool) -> None:
    """Replace a sub-layer by placeholders, which return its last bias if it continues adding a constant."""
    bias = getattr(net.get_submodule(part.last), "bias", None) if constant else None
    stubs = {name: returns for name, returns in part.stubs.items() if not (constant and name == part.norm)}
    holders = (name for kind in ("zero", "pair", "triple") for name, returns in stubs.items() if returns == kind)
    holder = part.last if part.last in stubs else next(holders)
    for name, returns in stubs.items():
        stub = Removed(returns)
        if name == holder:
            stub.bias = None if bias is None else nn.Parameter(bias.detach())
        replace(net, name, stub)
    if part.kind == "attention" and part.module not in stubs:  # it stays, without a head
        tell_heads(net, part.module, part.width, [])


def _cut(
    net: Model,
    part: SubLayer,
    units: Tensor | None,
    layer: Tensor | None = None,
    hidden: Tensor | None = None,
) -> None:
    """Cut units and hidden dimensions of one sub-layer that stays, by their gates."""
    attention, columns, stream = part.kind == "attention", None, None if hidden is None else hidden > 0
    if units is not None:
        width = size_at(net, part.last)[1] // len(units)
        columns = units.repeat_interleave(width) > 0
        if attention:
            name, others = part.sites[part.values], len(parts_of(part.values)) - 1
            values = _spread(net, name, units, others + 1)
            _scale(net, name, rows=join_parts(part.values, [torch.ones_like(values)] * others + [values], width))
            left = (units > 0).nonzero().flatten().tolist()
            if len(left) < len(units):
                tell_heads(net, part.module, width, left)
        else:
            _scale(net, part.last, columns=units)
    for role, name in part.sites.items():
        if name != part.last:
            kept = None
            if units is not None:
                rows = _spread(net, name, units > 0, len(parts_of(role)))
                kept = join_parts(role, [rows] * len(parts_of(role)), len(rows) // len(units))
            _take(net, name, kept, stream)
    for name in part.also:
        if has(net, name):
            _take(net, name, columns, None)
    for gate in (layer, hidden):
        if gate is not None:
            _scale(net, part.last, rows=gate)
    _take(net, part.last, stream, columns)


def _spread(net: Model, name: str, units: Tensor, parts: int) -> Tensor:
    """Repeat the value of every unit for each of its rows in one of the ``parts`` matrices in the Linear ``name``.

    With grouped queries a unit is a head of keys and values, and has the rows of several heads of queries.
    """
    return units.repeat_interleave(size_at(net, name)[0] // parts // len(units))


def _cut_stream(net: Model, hidden: Tensor) -> None:
    """Cut hidden dimensions from embeddings, LayerNorms and the layers that read the last hidden states."""
    open_, stream = hidden > 0, residual_stream(net)
    for name in stream.sites[0].tables:
        embedding = module_at(net, name, nn.Embedding)
        table = SizedEmbedding(embedding.num_embeddings, int(open_.sum()))
        table.weight = nn.Parameter((embedding.weight * hidden)[:, open_])
        replace(net, name, table)
    for name in (name for site in stream.sites for name in site.norms):
        norm = module_at(net, name, nn.LayerNorm)
        small = SizedNorm(int(open_.sum()), norm.eps)
        small.weight, small.bias = (nn.Parameter((p * hidden)[open_]) for p in (norm.weight, norm.bias))
        replace(net, name, small)
    if stream.reader:
        _take(net, stream.reader, None, open_)


def _take(net: Model, name: str, rows: Tensor | None, columns: Tensor | None) -> None:
    """Slice one Linear to the given rows and columns; replace nothing if all stay."""
    rows, columns = (None if kept is None or kept.all() else kept for kept in (rows, columns))
    if rows is not None or columns is not None:
        replace(net, name, _sliced(net.get_submodule(name), rows, columns))


def _scale(net: Model, name: str, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Multiply the outputs (bias included) or the inputs of one Linear or its training layer, in place.

    With values of 0 and 1 alone nothing is done: what is at 0 is cut afterwards.
    """
    values = [value for value in (rows, columns) if value is not None]
    if next(net.get_submodule(name).parameters()).is_meta or all(bool(((v == 0) | (v == 1)).all()) for v in values):
        return
    for kind, tensor in net.get_submodule(name).named_parameters(recurse=False):
        if rows is not None and kind in _OUTPUTS:
            tensor.mul_(rows if tensor.ndim == 1 else rows[:, None])
        if columns is not None and kind in _INPUTS:
            tensor.mul_(columns)


def _sliced(linear: Any, rows: Tensor | None, columns: Tensor | None) -> nn.Module:
    """Return a layer of the kind of ``linear``, for a Linear a SizedLinear, with some outputs and inputs; None: all."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in linear.named_parameters(recurse=False):
        if rows is not None and name in _OUTPUTS:
            tensor = tensor[rows]
        if columns is not None and name in _INPUTS:
            tensor = tensor[:, columns]
        tensors[name] = tensor
    if isinstance(linear, nn.Linear):
        return SizedLinear.from_tensors(tensors["weight"], tensors.get("bias"))
    spec = spec_of(linear)
    for size, kept in (("out_features", rows), ("in_features", columns)):
        if kept is not None:
            spec[size] = int(kept.sum())
    layer = LAYERS[spec.pop("kind")](**spec)
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


@torch.no_grad()
def remove_constant_units(net: Model) -> None:
    """Remove the heads and neurons of ``net`` whose output does not depend on the input, in place.

    The next bias takes the constants over. A family whose attention cannot have fewer heads keeps them. With grouped
    queries (Llama) the queries of a key go with it. Where one Linear is several matrices (ModernBERT), all of them lose
    the same rows.

    A neuron whose row of the first FFN matrix is zero always gives act(bias); with a gate, act(gate) * up, one constant
    factor is enough if it is 0. A head whose rows of the value matrix are all zero always gives their bias, since
    attention weights sum to 1 (in evaluation mode, without dropout on them). Only matrices without factors have such
    rows. If all heads are constant, one stays, with zeros for weights. Parameters that others share keep their values.
    """
    kept = {}
    for part in cuttable(net) if any(isinstance(module, LowRankSparseLinear) for module in net.modules()) else ():
        constant = (_fold_heads if part.kind == "attention" else _fold_neurons)(net, part)
        if constant is not None and constant.any():
            kept[part.last] = ~constant
    cut_units(net, kept)


def _dead_rows(linear: nn.Module) -> Tensor | None:
    """Return which outputs are constant, bool [out]; None for layers with factors and for ordinary Linears."""
    if not isinstance(linear, LowRankSparseLinear) or linear.rank:
        return None
    return ~linear.sparse.ne(0).any(1)


def _bias(linear: Any) -> Tensor:
    return linear.bias if linear.bias is not None else torch.zeros(linear.out_features)


def _fold_neurons(net: Model, part: SubLayer) -> Tensor | None:
    """Return which neurons are constant, bool [neurons]; the last bias gets what they give. None: it is not known."""
    from transformers.activations import ACT2FN

    roles = [role for role in ("gate", "up", "gate_up") if role in part.sites]
    firsts = [net.get_submodule(part.sites[role]) for role in roles]
    rows = [dead for linear in firsts if (dead := _dead_rows(linear)) is not None]
    if len(rows) < len(firsts):
        return None
    shape = sum(len(parts_of(role)) for role in roles), size_at(net, part.last)[1]
    constant, values = (torch.cat(of).view(shape) for of in (rows, [_bias(linear) for linear in firsts]))
    values[0] = ACT2FN[getattr(net.config, get_architecture(net).activation)](values[0])
    dead = constant.all(0) | (constant & (values == 0)).any(0)
    if dead.any():
        add_constant(net.get_submodule(part.last), dead, values.prod(0)[dead])
    return dead


def _fold_heads(net: Model, part: SubLayer) -> Tensor | None:
    """Return which heads (of keys) are constant, bool [heads], not all of them; see :func:`_fold_neurons`."""
    values, reader = (net.get_submodule(name) for name in (part.sites[part.values], part.last))
    if (rows := _dead_rows(values)) is None:
        return None
    of_heads, biases = (
        split_parts(part.values, of, part.width)[-1].view(-1, part.width) for of in (rows, _bias(values))
    )
    dead = of_heads.all(1)
    if not dead.any():
        return dead
    queries = size_at(net, part.last)[1] // (len(dead) * part.width)  # heads of q that read the same one of k and v
    value = biases.repeat_interleave(queries, 0).flatten()
    columns = dead.repeat_interleave(queries * part.width)
    add_constant(reader, columns, value[columns])
    if dead.all():  # the reshaping to heads needs one; all its weights are zero from here on
        for name in part.sites.values():
            for kind, tensor in net.get_submodule(name).named_parameters(recurse=False):
                if kind != "bias":
                    fill(net.get_submodule(name), **{kind: torch.zeros_like(tensor)})
        dead[0] = False
    return dead
