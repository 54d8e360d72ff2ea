"""Replacing modules of a net; describing the result as a structure, and rebuilding a net from it.

A structure is JSON, {module name: spec}, with the spec of the layer at that name, e.g.
{"kind": "low_rank", "in_features": 768, "out_features": 768, "rank": 64, "bias": true}. With the configuration
of the net it is enough to build all shapes without values, before a checkpoint is read or a strategy wraps the net.
Sizes may be smaller than the configuration's: slicing.py, methods/cofi/cut.py. A spec of kind "attributes" sets
attributes of the host model's own module, e.g. the number of heads that an attention has left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import (
    LAYERS,
    LowRankLinear,
    LowRankSparseLinear,
)
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Structure = dict[str, dict[str, Any]]


def replace(net: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module ``name`` of ``net`` by ``module``; the host model's code is not changed."""
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)


def set_attributes(module: nn.Module, values: dict[str, int]) -> None:
    """Set attributes of a module of the host model, and record them for the structure."""
    for name, value in values.items():
        setattr(module, name, value)
    module.changed = getattr(module, "changed", {}) | values  # type: ignore[assignment]


def describe(net: nn.Module) -> Structure:
    """Return the structure of ``net``: every replaced module with its kind and sizes."""
    structure = {}
    for name, module in net.named_modules():
        if isinstance(module, tuple(LAYERS.values())):
            structure[name] = module.spec()  # type: ignore[operator]
        elif hasattr(module, "changed"):
            structure[name] = {"kind": "attributes", **module.changed}
    return structure


Factors = Callable[[str, Tensor, int], tuple[Tensor, Tensor]]
BiasChange = Callable[[str, Tensor, Tensor], Tensor | None]


def factorize(
    net: PreTrainedModel,
    ranks: dict[str, int],
    factors: Factors | None,
    layer: type[LowRankLinear | LowRankSparseLinear] = LowRankLinear,
    bias_change: BiasChange | None = None,
) -> PreTrainedModel:
    """Replace the Linears named in ``ranks`` by ``layer``.

    Args:
        net: changed in place.
        ranks: site name -> rank.
        factors: function of name, weight [out, in] and rank that returns left [out, rank] and right [rank, in]; None
            for zeros, where a checkpoint will be loaded.
        layer: class of the layer that replaces a Linear.
        bias_change: function of name, weight and its approximation that returns what the bias [out] gets, or None.
    """
    for name, rank in track(ranks.items(), "factorize", len(ranks)):
        linear = net.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name} is {type(linear).__name__}"
        if factors is None:
            left, right = torch.zeros(linear.out_features, rank), torch.zeros(rank, linear.in_features)
        else:
            left, right = factors(name, linear.weight.detach(), rank)
            change = bias_change(name, linear.weight.detach(), left @ right) if bias_change else None
            if change is not None:
                linear.bias.data += change
        replace(net, name, layer.from_factors(linear, left, right))
    return net


def rebuild(net: PreTrainedModel, structure: Structure) -> PreTrainedModel:
    """Replace modules of ``net`` as ``structure`` says; their values are not initialised."""
    for name, spec in structure.items():
        parent, _, child = name.rpartition(".")
        module = getattr(net.get_submodule(parent), child, None)
        sizes = {key: value for key, value in spec.items() if key != "kind"}
        if spec["kind"] == "attributes":
            set_attributes(module, sizes)
        elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
            layer.adopt(module, **sizes)
        else:
            replace(net, name, layer(**sizes))
    return net


def fill(module: nn.Module, **values: Tensor | None) -> None:
    """Set parameters of ``module`` to ``values``, in their dtype; the caller casts the whole net afterwards.

    They are made contiguous, as a checkpoint has them: with other strides products would round differently.
    """
    for name, value in values.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)))
