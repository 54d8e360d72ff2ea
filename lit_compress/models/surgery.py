"""Replacing modules of a net; describing the result as a structure, and rebuilding a net from it.

A structure is JSON, {module name: spec}, with the spec of the layer at that name, e.g.
{"kind": "low_rank", "in_features": 768, "out_features": 768, "rank": 64, "bias": true}. With the configuration
of the net it is enough to build all shapes without values, before a checkpoint is read or a strategy wraps the net.
Sizes may be smaller than the configuration's: slicing.py, cut.py. A spec of kind "attributes" sets
attributes of the host model's own module, e.g. the number of heads that an attention has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.layers import (
    LAYERS,
    LowRankEmbedding,
    LowRankLinear,
    LowRankSparseLinear,
    SizedEmbedding,
    SizedLinear,
    StackedLowRankLinear,
)
from lit_compress.models.transposed import in_form_of_files
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Structure = dict[str, dict[str, Any]]


def replace(net: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module ``name`` of ``net`` by ``module``; the host model's code is not changed."""
    path, _, child = name.rpartition(".")
    parent = net.get_submodule(path)
    setattr(parent, child, in_form_of_files(parent, child, module))


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
    stacks: Mapping[str, tuple[str, ...]] | None = None,
) -> PreTrainedModel:
    """Replace the Linears named in ``ranks`` by ``layer``, stacks of them by StackedLowRankLinears, tables by factors.

    Args:
        net: changed in place.
        ranks: name of a site, or of a table of embeddings, -> rank.
        factors: function of name, weight [out, in] and rank that returns left [out, rank] and right [rank, in]; None
            for zeros, where a checkpoint will be loaded, or for shapes only.
        layer: class of the layer that replaces a Linear.
        bias_change: function of name, weight and its approximation that returns what the bias [out] gets, or None.
        stacks: first site -> names of all sites that get one right factor; for the two functions the first name is
            that of the stack, the weight has the rows of all its matrices.
    """
    stacks = stacks or {}
    for name, rank in track(ranks.items(), "factorize", len(ranks)):
        names = stacks.get(name, (name,))
        weight = stacked_weight(net, names)
        if factors is None:
            left, right = (
                torch.zeros(size, device=weight.device) for size in ((len(weight), rank), (rank, weight.shape[1]))
            )
        else:
            left, right = factors(name, weight, rank)
            change = bias_change(name, weight, left @ right) if bias_change else None
            if change is not None:
                for site, part in zip(names, change.split(_heights(net, names)), strict=True):
                    net.get_submodule(site).bias.data += part
        if isinstance(table := net.get_submodule(name), nn.Embedding | SizedEmbedding):
            factors_of = (right.T.contiguous(), left.T.contiguous())
            replace(net, name, LowRankEmbedding.from_factors(table, *factors_of))
            continue
        if len(names) == 1:
            replace(net, name, layer.from_factors(_linear(net, name), left, right))  # type: ignore[arg-type]
            continue
        for site, part in zip(names, left.split(_heights(net, names)), strict=True):
            first = "" if site == name else name
            linear = _linear(net, site)
            stacked = StackedLowRankLinear.from_factors(linear, part, right, first, len(names))  # type: ignore[arg-type]
            replace(net, site, stacked)
    return link(net)


def product_of(layer: nn.Module) -> Tensor:
    """Return left @ right [out, in] of a layer with factors."""
    left, right = layer.factors() if hasattr(layer, "factors") else (layer.left, layer.right)
    return (left.detach().double() @ right.detach().double()).to(left.dtype)


def multiply_out(net: PreTrainedModel) -> PreTrainedModel:
    """Replace every low-rank Linear and table of ``net``, in place, by the dense one with the same outputs."""
    kinds = (LowRankLinear, StackedLowRankLinear, LowRankEmbedding)
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, kinds)}
    weights = {name: product_of(layer) for name, layer in layers.items()}  # all before the first factor is gone
    for name, layer in layers.items():
        rows, columns = weights[name].shape
        with torch.device("meta"):
            dense: nn.Module
            if isinstance(layer, LowRankEmbedding):
                dense = nn.Embedding(rows, columns, layer.padding_idx)
            else:
                dense = nn.Linear(columns, rows, layer.bias is not None)
        fill(dense, weight=weights[name], bias=getattr(layer, "bias", None))
        replace(net, name, dense)
    return net


def _linear(net: nn.Module, name: str) -> nn.Linear | SizedLinear:
    linear = net.get_submodule(name)
    assert isinstance(linear, nn.Linear | SizedLinear), f"{name} is {type(linear).__name__}"
    return linear


def _heights(net: nn.Module, names: Sequence[str]) -> list[int]:
    return [int(net.get_submodule(name).out_features) for name in names]  # type: ignore[arg-type]


def stacked_weight(net: nn.Module, names: Sequence[str]) -> Tensor:
    """Return the weight [out, in] of one Linear of ``net``, or the rows of several that read the same input.

    A table of embeddings is the matrix [width, tokens] that reads one-hot vectors.
    """
    if isinstance(table := net.get_submodule(names[0]), nn.Embedding | SizedEmbedding):
        return table.weight.detach().T
    weights = [_linear(net, name).weight.detach() for name in names]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


LARGEST = 2**16  # size in a structure that a net may have without a tensor that is as large


def check_structure(structure: Any, net: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a structure that is not one of ``net``, or whose sizes are beyond those of the tensors in its file.

    Args:
        structure: as read from JSON.
        net: the dense net, see :func:`rebuild`.
        shapes: of the tensors in the file, by name.

    Raises:
        UserError: names the first module.
    """
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    if not isinstance(structure, dict):
        raise UserError("structure.json holds no JSON object")
    for name, spec in structure.items():
        if not isinstance(spec, dict) or not (spec.get("kind") == "attributes" or spec.get("kind") in set(LAYERS)):
            raise UserError(f"structure.json: '{name:.80}' is {spec!r:.80}, no layer of this package")
        for key, value in spec.items():
            if isinstance(value, int | float) and not 0 <= value <= max(largest, LARGEST):
                raise UserError(f"structure.json: {key} of '{name:.80}' is {value}, beyond the tensors of the file")
            if spec["kind"] == "attributes" and key != "kind":
                own = getattr(net.get_submodule(name), key, None)
                if type(value) is not int or type(own) is not int:
                    raise UserError(f"structure.json: '{name:.80}' has no number '{key:.80}' to be {value!r:.80}")


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
    return link(net)


def link(net: PreTrainedModel) -> PreTrainedModel:
    """Let every layer of ``net`` that needs another one look it up."""
    for module in net.modules():
        if hasattr(module, "link"):
            module.link(net)
    return net


def fill(module: nn.Module, **values: Tensor | None) -> None:
    """Set parameters of ``module`` to ``values``, in their dtype; the caller casts the whole net afterwards.

    They are made contiguous, as a checkpoint has them: with other strides products would round differently.
    """
    for name, value in values.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)))
