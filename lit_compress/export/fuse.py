"""The model of an export: each layer is the cheapest one with the same outputs; fewer rows and bits as asked."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.export.choices import Choices
from lit_compress.export.runtimes import Dtype
from lit_compress.export.vocabulary import cut_rows, shrink_table
from lit_compress.layers import LAYER_TYPES, LowRankRowsLinear, SizedLinear
from lit_compress.models.accounting import dense_layers, weights
from lit_compress.models.cut import remove_constant_units
from lit_compress.models.sites import Model
from lit_compress.models.surgery import link, replace, with_same_parameters
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError

# Share of a matrix's parameters, so of its FLOPs, above which factors and rows may be slower than the matrix.
# One thread of an AMD EPYC, 384 x 384 to 3072 x 768 (benchmarks/pruning/speed.py): at 32 x 128 tokens 0.63 - 0.85 of
# the matrix's time at 0.7, 0.74 - 1.00 at 0.8, 0.82 - 1.17 at 0.9.
MERGE = 0.7


def compact(net: Model) -> Model:
    """Return a copy of ``net`` that stores only the kept values, with the same outputs in evaluation mode.

    Units with constant outputs are removed, and every layer is the smallest one. Other parameters are shared.
    """
    small = with_same_parameters(net)
    remove_constant_units(small)
    dense = dense_layers(small)
    for name, module in list(small.named_modules()):
        if isinstance(module, LAYER_TYPES):
            smallest = module.fuse() if hasattr(module, "fuse") else module
            whole = isinstance(smallest, nn.Linear) and not isinstance(smallest, SizedLinear)
            if whole and smallest.weight.numel() != dense[name].weight.numel():
                smallest = SizedLinear.from_tensors(smallest.weight, smallest.bias)
            replace(small, name, smallest)
    return link(small).eval()


def merged(net: Model) -> dict[str, float]:
    """Return the layers with rows that may be slower than dense ones: {name: share of the matrix's parameters}."""
    shares = {
        name: sum(weight.numel() for weight in weights(module)) / (module.in_features * module.out_features)
        for name, module in net.named_modules()
        if isinstance(module, LowRankRowsLinear) and module.rows
    }
    return {name: share for name, share in shares.items() if share > MERGE}


def fuse(net: Model) -> Model:
    """Return a copy of ``net`` as it is exported for speed: :func:`compact`, the layers of :func:`merged` dense."""
    fused = compact(net)
    return store_dense(fused, merged(fused))


def store_dense(net: Model, names: Iterable[str]) -> Model:
    """Store the layers ``names`` of ``net`` as dense matrices, in place; return ``net``."""
    dense: dict[str, Any] = {name: net.get_submodule(name) for name in names}
    layers = {name: SizedLinear.from_tensors(layer.dense(), layer.bias) for name, layer in dense.items()}
    for name, layer in layers.items():  # after the last product
        replace(net, name, layer)
    return net


def cast(net: Model, dtype: Dtype) -> None:
    """Cast the floating-point weights of ``net``, which get new parameters, and name the dtype in its configuration.

    Raises:
        UserError: a weight is too large.
    """
    kind = getattr(torch, dtype)
    net.config.dtype = kind
    new = {}
    for name, value in net.named_parameters():
        new[value] = nn.Parameter(in_dtype(name, value.detach(), kind)) if value.is_floating_point() else value
    for module in net.modules():  # some tensors have several owners
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[value])
    net.to(kind)  # buffers


def in_dtype(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in ``dtype``, and any other as it is.

    Raises:
        UserError: ``dtype`` cannot hold its values.
    """
    if not value.is_floating_point():
        return value
    if not all_finite(cast := value.to(dtype)):
        raise UserError(f"export: --dtype {str(dtype)[6:]} cannot hold the values of '{name}'; nearest: bfloat16")
    return cast


def outline_export(net: Model, choices: Choices, tokens_left: int | None = None, merge: bool = False) -> Model:
    """Return a copy of ``net``, without values, in the shapes and dtypes of the file that ``write_export`` writes.

    ``tokens_left`` is the number of rows that ``vocabulary data`` keeps; with ``merge``, it is :func:`fuse`'s copy.

    Raises:
        UserError: ``net`` cannot have these choices.
    """
    small = fuse(net) if merge else compact(net)
    if tokens_left is not None:
        cut_rows(small, range(tokens_left))
    if choices.embeddings:
        shrink_table(small)
    return move(copy.deepcopy(small), getattr(torch, choices.dtype)) if choices.half else small  # not the shared values
