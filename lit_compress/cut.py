"""Cut heads and neurons away: smaller Linears, and what the lost ones gave, if it was a constant, in the next bias.

The Hugging Face code needs no change for this in BERT, RoBERTa, ELECTRA and DistilBERT, which find the number of heads
from the width of the projections. The new sizes travel in the layers' specs (surgery.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.families import find_sites
from lit_compress.layers import LAYERS, LowRankSparseLinear, SizedLinear
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# where heads can be cut
ACTIVATION = {"bert": "hidden_act", "roberta": "hidden_act", "electra": "hidden_act", "distilbert": "activation"}

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
    x = value.new_zeros(len(columns))
    x[columns] = value
    linear.bias = nn.Parameter(linear(x))


def cut_constants(net: PreTrainedModel) -> set[str]:
    """Cut the heads and neurons of ``net`` whose output no longer depends on the input, in place.

    A neuron whose row of the first FFN matrix is zero always gives act(bias). A head whose rows of the value
    matrix are all zero always gives their bias, since attention weights sum to 1 (in evaluation mode, without
    dropout on them). Only matrices without a low-rank part have such rows. One head stays when all are dead, with
    zeros for weights.

    Returns:
        Names of the layers that are smaller now.
    """
    blocks: dict[tuple[str, int], dict[str, str]] = {}
    for site in find_sites(net):
        blocks.setdefault((site.stack, site.layer), {})[site.role] = site.name
    cut: set[str] = set()
    if net.config.model_type in ACTIVATION:
        for names in blocks.values():
            cut |= _cut_neurons(net, names) | _cut_heads(net, names)
    return cut


def _dead_rows(linear: nn.Module) -> Tensor | None:
    """Return which outputs are constant, bool [out]; None if the layer is not one that loses rows."""
    if not isinstance(linear, LowRankSparseLinear) or linear.rank:
        return None
    return ~linear.sparse.ne(0).any(1)


def _bias(linear: nn.Module, rows: Tensor) -> Tensor:
    return linear.bias[rows] if linear.bias is not None else torch.zeros(int(rows.sum()))  # type: ignore[index]


@torch.no_grad()
def _cut_neurons(net: PreTrainedModel, names: dict[str, str]) -> set[str]:
    from transformers.activations import ACT2FN

    up, down = net.get_submodule(names["up"]), net.get_submodule(names["down"])
    dead = _dead_rows(up)
    if dead is None or not dead.any():
        return set()
    activation = getattr(net.config, ACTIVATION[net.config.model_type])
    add_constant(down, dead, ACT2FN[activation](_bias(up, dead)))
    replace(net, names["up"], take(up, rows=~dead))
    replace(net, names["down"], take(down, columns=~dead))
    return {names["up"], names["down"]}


@torch.no_grad()
def _cut_heads(net: PreTrainedModel, names: dict[str, str]) -> set[str]:
    q, k, v, o = (net.get_submodule(names[role]) for role in "qkvo")
    rows = _dead_rows(v)
    width = net.config.hidden_size // net.config.num_attention_heads
    dead = rows.view(-1, width).all(1).repeat_interleave(width) if rows is not None else None
    if dead is None or not dead.any():
        return set()
    add_constant(o, dead, _bias(v, dead))
    if dead.all():  # the reshaping to heads needs one; all its weights are zero from here on
        for layer in (q, k, o):
            for name, tensor in layer.named_parameters(recurse=False):
                if name != "bias":
                    tensor.zero_()
        dead[:width] = False
    for role, layer in zip("qkv", (q, k, v), strict=True):
        replace(net, names[role], take(layer, rows=~dead))
    replace(net, names["o"], take(o, columns=~dead))
    return {names[role] for role in "qkvo"}
