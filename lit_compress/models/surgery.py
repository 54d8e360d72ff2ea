"""Replacing modules of a model; describing the result as a structure; models without values, of shapes alone.

A structure is JSON, {module name: spec}, with the spec of the layer at that name, e.g.
{"kind": "low_rank", "in_features": 768, "out_features": 768, "rank": 64, "bias": true}. With the configuration it is
enough to build all shapes without values, before a checkpoint is read or a strategy wraps the model. A spec of kind
"attributes" sets attributes of the host model's own module, e.g. the number of heads that an attention has left.

GPT-2's ``Conv1D`` is a Linear in all models of the package: ``as_linears`` is called where a model is built or loaded.
From there on all code sees Linears, and all files, state dicts included, have the form of the family, so that ordinary
programs load them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lit_compress.layers import (
    LAYER_TYPES,
    LAYERS,
    LowRankLinear,
    LowRankSparseLinear,
    Removed,
    SomeHeads,
    StackedLowRankLinear,
)
from lit_compress.models.architectures import get_architecture
from lit_compress.models.sites import Model, module_at, size_at
from lit_compress.numerics.kronecker import change_of_bias
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

Net = TypeVar("Net", bound=Model)
_NAMES = "transposed"  # attribute of a module: names of its children whose weights are transposed in files
Structure = dict[str, dict[str, Any]]
LARGEST = 2**16  # size in a structure that a model may have without a tensor that is as large


class TransposedLinear(nn.Linear):
    """A Linear whose weight is [in, out] in a state dict."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (name := f"{prefix}weight") in destination:  # under another name where it has a low-rank update
            destination[name] = destination[name].t()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (name := f"{prefix}weight") in state_dict:
            state_dict[name] = state_dict[name].t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)


def as_linears(net: Net) -> Net:
    """Replace every ``Conv1D`` of ``net`` by a Linear with the same values, in place; return ``net``."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(net.modules()):
        transposed = {name: child for name, child in parent.named_children() if isinstance(child, Conv1D)}
        for name, old in transposed.items():
            linear = TransposedLinear(old.nx, old.nf, device="meta")
            linear.weight, linear.bias = nn.Parameter(old.weight.detach().t().contiguous()), old.bias
            setattr(parent, name, linear.train(old.training))
        if transposed:
            setattr(parent, _NAMES, frozenset(transposed))
    return net


def replace(net: nn.Module, name: str, module: nn.Module | nn.Parameter) -> None:
    """Replace the module or parameter ``name`` of ``net``; the host model's code is not changed."""
    path, _, child = name.rpartition(".")
    parent = net.get_submodule(path)
    if type(module) is nn.Linear and child in getattr(parent, _NAMES, ()):
        module.__class__ = TransposedLinear
    setattr(parent, child, module)


def set_attributes(module: nn.Module, values: dict[str, int]) -> None:
    """Set attributes of a module of the host model, and record them for the structure."""
    for name, value in {**values, "changed": getattr(module, "changed", {}) | values}.items():
        setattr(module, name, value)


def tell_heads(net: Model, name: str, width: int, left: list[int]) -> None:
    """Tell the attention ``name``, whose heads have this width, which of them are ``left``, if its code needs that.

    These are numbers among the heads that it had before.
    """
    architecture = get_architecture(net)
    if layer := architecture.shares_bias:
        attention: Any = net.get_submodule(name)
        before = attention.heads if isinstance(attention, SomeHeads) else range(net.config.num_attention_heads)
        if len(left) < len(before):
            layer.adopt(attention, [before[head] for head in left])
    elif architecture.head_attributes:
        set_attributes(net.get_submodule(name), architecture.head_attributes(width, len(left)))


def with_same_parameters(net: Model) -> Model:
    """Return a copy of ``net`` that shares its parameters: replace them in the copy, and never change their values."""
    return copy.deepcopy(net, {id(parameter): parameter for parameter in net.parameters()})


def spec_of(layer: Any) -> dict[str, Any]:
    """Return the kind of a layer and the arguments of its constructor, or of its ``adopt``, as JSON."""
    names = list(signature(getattr(type(layer), "adopt", type(layer).__init__)).parameters)[1:]
    own = {"bias": layer.bias is not None} if "bias" in names else {}
    sizes = {name: getattr(layer, name) if hasattr(layer, name) else layer.embedding_dim for name in names} | own
    if isinstance(layer, Removed) and not layer.features:
        del sizes["features"]
    return {"kind": layer.kind, **sizes}


def describe(net: nn.Module) -> Structure:
    """Return the structure of ``net``: every replaced module with its kind and sizes."""
    structure = {}
    for name, module in net.named_modules():
        if isinstance(module, LAYER_TYPES):
            structure[name] = spec_of(module)
        elif hasattr(module, "changed"):
            structure[name] = {"kind": "attributes", **module.changed}
    return structure


def factorize(
    net: Model,
    ranks: dict[str, int],
    factors: Callable[[str, Tensor, int], tuple[Tensor, Tensor]] | None,
    layer: type[LowRankLinear | LowRankSparseLinear] = LowRankLinear,
    mean: Callable[[str], Tensor | None] = lambda name: None,
    stacks: Mapping[str, tuple[str, ...]] | None = None,
) -> Model:
    """Replace the Linears named in ``ranks`` (site -> rank), in place, by ``layer``, stacks by StackedLowRankLinears.

    Args:
        factors: function of name, weight [out, in] and rank that returns left [out, rank] and right [rank, in]; None
            for zeros, where a checkpoint will be loaded, or for shapes only.
        mean: function of name that returns the mean [in] of the inputs, whose outputs the biases keep; None: they stay.
        stacks: first site -> names of all sites that get one right factor. To the two functions the first name is the
            stack's, and the weight has the rows of all its matrices.
    """
    for name, rank in track(ranks.items(), "factorize", len(ranks)):
        names = (stacks or {}).get(name, (name,))
        weight, heights = stacked_weight(net, names), [size_at(net, site)[0] for site in names]
        if factors is None:
            left, right = weight.new_zeros(len(weight), rank), weight.new_zeros(rank, weight.shape[1])
        else:
            left, right = factors(name, weight, rank)
            if (centre := mean(name)) is not None:
                change = change_of_bias(weight, left @ right, centre)
                for site, part in zip(names, change.split(heights), strict=True):
                    net.get_parameter(f"{site}.bias").data += part
        old = net.get_submodule(name)
        if len(names) == 1:
            replace(net, name, layer.from_factors(old, left, right))
        else:
            for site, part in zip(names, left.split(heights), strict=True):
                first, linear = "" if site == name else name, net.get_submodule(site)
                replace(net, site, StackedLowRankLinear.in_stack(linear, part, right, first, len(names)))
    return link(net)


def stacked_weight(net: nn.Module, names: Sequence[str]) -> Tensor:
    """Return the weight [out, in] of one Linear of ``net``, or the rows of several that read the same input."""
    weights = [module_at(net, name, nn.Linear).weight.detach() for name in names]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def check_structure(structure: Any, net: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a structure that does not fit ``net``, or whose sizes exceed the tensors in its file.

    ``net`` is the dense model of :func:`rebuild`; ``shapes`` are of the tensors in the file, by name.

    Raises:
        UserError: names the first module.
    """
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    if not isinstance(structure, dict):
        raise UserError("structure.json holds no JSON object")
    modules = dict(net.named_modules())
    for name, spec in structure.items():
        kind = str(spec.get("kind")) if isinstance(spec, dict) else ""
        if kind != "attributes" and kind not in LAYERS:
            raise UserError(f"structure.json: '{name:.80}' is {spec!r:.80}, no layer of this package")
        if name not in modules and name.rpartition(".")[0] not in modules:  # layers may be added to a block
            raise UserError(f"structure.json: the model has no module '{name:.80}'")
        for key, value in spec.items():
            if isinstance(value, int | float) and not 0 <= value <= max(largest, LARGEST):
                raise UserError(f"structure.json: {key} of '{name:.80}' is {value}, beyond the tensors of the file")
            if kind == "attributes" and key != "kind":
                own = getattr(modules[name], key, None)
                if type(value) is not int or type(own) is not int:
                    raise UserError(f"structure.json: '{name:.80}' has no number '{key:.80}' to be {value!r:.80}")


def rebuild(net: Model, structure: Structure) -> Model:
    """Replace modules of ``net`` as ``structure`` says; their values are not initialised."""
    for name, spec in structure.items():
        sizes = {key: value for key, value in spec.items() if key != "kind"}
        if spec["kind"] == "attributes":
            set_attributes(net.get_submodule(name), sizes)
        elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
            layer.adopt(net.get_submodule(name), **sizes)
        else:
            replace(net, name, layer(**sizes))
    return link(net)


def link(net: Model) -> Model:
    """Let every layer of ``net`` that needs another one look it up."""
    for module in net.modules():
        if look_up := getattr(module, "link", None):
            look_up(net)
    return net


def fill(module: nn.Module, **values: Tensor | None) -> None:
    """Set parameters of ``module`` to ``values``, in their dtype; the caller casts the whole model afterwards.

    They are made contiguous, as a checkpoint has them: with other strides products would round differently.
    """
    for name, value in values.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)))


def without_values(build: Callable[[], Model]) -> Model:
    """Return the model that ``build`` makes, with weights that have shapes but neither values nor memory.

    Their random initialization is left out: on the device ``meta`` it has no effect, but takes most of the time.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        net = build()
    net.tie_weights()  # which the initialization does
    return net


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Give the modules that are built in this context parameters that have shapes, but neither values nor memory.

    Buffers are as usual, unlike under the device ``meta``: once parameters are loaded, the module is whole. The sizes
    of a file can so be compared before they are allocated.
    """
    from transformers.initialization import no_init_weights

    def empty(module: nn.Module, name: str, value: nn.Parameter) -> Any:  # torch's annotation is None
        if value.is_meta:
            return None  # stays unchanged, so that tied parameters stay one
        return nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(empty)
    try:
        with no_init_weights():
            yield
    finally:
        hook.remove()


def with_random_values(net: Model) -> Model:
    """Return ``net``, or, if it has no values, a copy on the CPU with random numbers and a new model's buffers."""
    from transformers.initialization import no_init_weights

    if not any(parameter.is_meta for parameter in net.parameters()):
        return net
    whole, generator = copy.deepcopy(net).to_empty(device="cpu").eval(), torch.Generator().manual_seed(0)
    with torch.no_grad(), no_init_weights():
        fresh = dict(type(net)(net.config).named_buffers())
        for value in whole.parameters():
            value.normal_(0.0, 0.02, generator=generator) if value.is_floating_point() else value.zero_()
        for name, buffer in whole.named_buffers():
            buffer.copy_(fresh[name]) if name in fresh else buffer.zero_()
    return whole
