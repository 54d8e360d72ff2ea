"""Removal of heads and neurons whose outputs do not depend on the input; the next bias takes the constants over.

A family whose attention cannot have fewer heads keeps them. With grouped queries (Llama) the queries of a key go with
it. Where one Linear is several matrices (ModernBERT), all of them lose the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import LowRankSparseLinear
from lit_compress.models.architectures import get_architecture
from lit_compress.models.cut import add_constant, cut_units
from lit_compress.models.record import parts_of, split_parts
from lit_compress.models.sites import SubLayer, cuttable, size_at
from lit_compress.models.surgery import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def remove_constant_units(net: PreTrainedModel) -> None:
    """Remove the heads and neurons of ``net`` whose output does not depend on the input, in place.

    A neuron whose row of the first FFN matrix is zero always gives act(bias); with a gate, act(gate) * up, one constant
    factor is enough if it is 0. A head whose rows of the value matrix are all zero always gives their bias, since
    attention weights sum to 1 (in evaluation mode, without dropout on them). Only matrices without factors have such
    rows. If all heads are constant, one stays, with zeros for weights.

    Args:
        net: its parameters keep their values, others may take their places.
    """
    kept = {}
    for part in cuttable(net):
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


def _fold_neurons(net: PreTrainedModel, part: SubLayer) -> Tensor | None:
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


def _fold_heads(net: PreTrainedModel, part: SubLayer) -> Tensor | None:
    """Return which heads (of keys) are constant, bool [heads], not all of them; see :func:`_fold_neurons`."""
    last = [role for role in part.sites if role != "o"][-1]
    values, reader = (net.get_submodule(name) for name in (part.sites[last], part.last))
    if (rows := _dead_rows(values)) is None:
        return None
    dead = split_parts(last, rows, part.width)[-1].view(-1, part.width).all(1)
    if not dead.any():
        return dead
    queries = size_at(net, part.last)[1] // (len(dead) * part.width)  # heads of q that read the same one of k and v
    value = (
        split_parts(last, _bias(values), part.width)[-1].view(-1, part.width).repeat_interleave(queries, 0).flatten()
    )
    columns = dead.repeat_interleave(queries * part.width)
    add_constant(reader, columns, value[columns])
    if dead.all():  # the reshaping to heads needs one; all its weights are zero from here on
        for name in part.sites.values():
            linear = net.get_submodule(name)
            own = [(kind, tensor) for kind, tensor in linear.named_parameters(recurse=False) if kind != "bias"]
            fill(linear, **{kind: torch.zeros_like(tensor) for kind, tensor in own})
        dead[0] = False
    return dead
