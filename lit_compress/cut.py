"""Cut heads and neurons away: smaller Linears, and what the lost ones gave, if it was a constant, in the next bias.

The Hugging Face code needs no change for this: it finds the number of heads from the width of the projections. Not so
in OPT, which has it as a number, and in T5, whose bias of relative positions has as many heads in every layer: there,
neurons are cut, heads stay. With grouped queries (Llama) the queries of a key go with it. The new sizes travel in the
layers' specs (surgery.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.families import find_sites, head_width
from lit_compress.layers import LAYERS, LowRankSparseLinear, SizedLinear
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# where neurons can be cut: what the configuration calls their activation
ACTIVATION = {
    "bert": "hidden_act", "roberta": "hidden_act", "electra": "hidden_act", "distilbert": "activation",
    "bart": "activation_function", "opt": "activation_function", "t5": "dense_act_fn", "llama": "hidden_act",
}  # fmt: skip
# where heads can be cut
HEADS = ("bert", "roberta", "electra", "distilbert", "bart", "llama")

_OUT, _IN = ("weight", "left", "sparse", "bias"), ("weight", "right", "sparse")


@torch.no_grad()
def take(linear: nn.Module, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Module:
    """Return a layer of the same kind with some outputs and inputs of ``linear`` only; a Linear gives a SizedLinear.

    Args:
        linear: a Linear or a training form of one.
        rows: bool [out], the outputs to keep; None for all.
        columns: bool [in], the inputs to keep; None for all.
    """
    tensors = {}
    for name, tensor in linear.named_parameters(recurse=False):
        if rows is not None and name in _OUT:
            tensor = tensor[rows]
        if columns is not None and name in _IN:
            tensor = tensor[:, columns]
        tensors[name] = tensor
    if isinstance(linear, nn.Linear):
        return SizedLinear.from_tensors(tensors["weight"], tensors.get("bias"))
    spec = linear.spec()  # type: ignore[operator]
    kind = LAYERS[spec.pop("kind")]
    if rows is not None:
        spec["out_features"] = int(rows.sum())
    if columns is not None:
        spec["in_features"] = int(columns.sum())
    layer = kind(**spec)
    for name, tensor in tensors.items():
        setattr(layer, name, nn.Parameter(tensor.detach().contiguous()))
    return layer


@torch.no_grad()
def add_constant(linear: nn.Module, columns: Tensor, value: Tensor) -> None:
    """Put into the bias what the inputs ``columns`` (bool [in]) give when they are always ``value`` [columns]."""
    if linear.bias is None and not value.any():
        return
    x = value.new_zeros(len(columns))
    x[columns] = value
    linear.bias = nn.Parameter(linear(x))


def cut_constants(net: PreTrainedModel) -> set[str]:
    """Cut the heads and neurons of ``net`` whose output no longer depends on the input, in place.

    A neuron whose row of the first FFN matrix is zero always gives act(bias); with a gate, act(gate) * up, one constant
    factor is enough if it is 0. A head whose rows of the value
    matrix are all zero always gives their bias, since attention weights sum to 1 (in evaluation mode, without
    dropout on them). Only matrices without a low-rank part have such rows. One head stays when all are dead, with
    zeros for weights.

    Returns:
        Names of the layers that are smaller now.
    """
    parts: dict[tuple[str, int, bool], dict[str, str]] = {}
    for site in find_sites(net):
        parts.setdefault((site.stack, site.layer, site.cross), {})[site.role] = site.name
    cut: set[str] = set()
    for (stack, *_), names in parts.items():
        if net.config.model_type in ACTIVATION and "up" in names:
            cut |= _cut_neurons(net, names)
        if net.config.model_type in HEADS and "q" in names:
            cut |= _cut_heads(net, names, head_width(net, stack))
    return cut


def _dead_rows(linear: nn.Module) -> Tensor | None:
    """Return which outputs are constant, bool [out]; None if the layer is not one that loses rows."""
    if not isinstance(linear, LowRankSparseLinear) or linear.rank:
        return None
    return ~linear.sparse.ne(0).any(1)


def _bias(linear: nn.Module) -> Tensor:
    return linear.bias if linear.bias is not None else torch.zeros(linear.out_features)  # type: ignore


@torch.no_grad()
def _cut_neurons(net: PreTrainedModel, names: dict[str, str]) -> set[str]:
    from transformers.activations import ACT2FN

    roles = [role for role in ("gate", "up") if role in names]
    firsts, down = [net.get_submodule(names[role]) for role in roles], net.get_submodule(names["down"])
    constant = [rows for linear in firsts if (rows := _dead_rows(linear)) is not None]
    if len(constant) < len(firsts):
        return set()
    values = [_bias(linear) for linear in firsts]
    values[0] = ACT2FN[getattr(net.config, ACTIVATION[net.config.model_type])](values[0])
    zero = [rows & (value == 0) for rows, value in zip(constant, values, strict=True)]
    dead = torch.stack(constant).all(0) | torch.stack(zero).any(0)
    if not dead.any():
        return set()
    add_constant(down, dead, torch.stack(values).prod(0)[dead])
    for role, linear in zip(roles, firsts, strict=True):
        replace(net, names[role], take(linear, rows=~dead))
    replace(net, names["down"], take(down, columns=~dead))
    return {names[role] for role in (*roles, "down")}


@torch.no_grad()
def _cut_heads(net: PreTrainedModel, names: dict[str, str], width: int) -> set[str]:
    q, k, v, o = (net.get_submodule(names[role]) for role in "qkvo")
    rows = _dead_rows(v)
    dead = rows.view(-1, width).all(1) if rows is not None else None
    if dead is None or not dead.any():
        return set()

    def outputs(heads: Tensor, queries: int = 1) -> Tensor:
        return heads.repeat_interleave(queries).repeat_interleave(width)

    queries = q.out_features // v.out_features  # heads of q that read the same one of k and v
    value = _bias(v).view(-1, width).repeat_interleave(queries, 0).flatten()
    add_constant(o, outputs(dead, queries), value[outputs(dead, queries)])
    if dead.all():  # the reshaping to heads needs one; all its weights are zero from here on
        for layer in (q, k, o):
            for name, tensor in layer.named_parameters(recurse=False):
                if name != "bias":
                    tensor.zero_()
        dead[0] = False
    replace(net, names["q"], take(q, rows=~outputs(dead, queries)))
    replace(net, names["k"], take(k, rows=~outputs(dead)))
    replace(net, names["v"], take(v, rows=~outputs(dead)))
    replace(net, names["o"], take(o, columns=~outputs(dead, queries)))
    return {names[role] for role in "qkvo"}
