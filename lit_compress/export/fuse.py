"""Fusing: replacing every layer by the cheapest one with the same outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from lit_compress.layers import LAYER_TYPES, LowRankRowsLinear, SizedLinear
from lit_compress.models.accounting import dense_layers, weights
from lit_compress.models.constant_units import remove_constant_units
from lit_compress.models.prices import factor_prices
from lit_compress.models.surgery import link, product_of, replace, with_same_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Share of a matrix's parameters, so of its FLOPs, above which factors and rows may be slower than the matrix.
# One thread of an AMD EPYC, 384 x 384 to 3072 x 768 (benchmarks/pruning/speed.py): at 32 x 128 tokens 0.63 - 0.85 of
# the matrix's time at 0.7, 0.74 - 1.00 at 0.8, 0.82 - 1.17 at 0.9.
MERGE = 0.7


def compact(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``net`` that stores only the kept values, with the same outputs in evaluation mode.

    Heads and neurons with constant outputs are removed, then every layer is replaced by the smallest with the same
    outputs. The others keep their parameters, which ``net`` and the copy share.
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


def merged(net: PreTrainedModel) -> dict[str, float]:
    """Return the layers with rows that may be slower than dense ones: {name: share of the matrix's parameters}."""
    shares = {
        name: _share(module)
        for name, module in net.named_modules()
        if isinstance(module, LowRankRowsLinear) and module.rows
    }
    return {name: share for name, share in shares.items() if share > MERGE}


def slower(net: PreTrainedModel, length: int) -> dict[str, float]:
    """Return the matrices whose factors and rows take as long as the dense ones, or longer: {name: share as above}.

    Args:
        net: of :func:`compact`.
        length: tokens of the one text that is read, with one thread.
    """
    lost = [group.names for group in factor_prices(net, length) if group.time >= group.dense]
    return {name: _share(net.get_submodule(name)) for names in lost for name in names}


def _share(module: Any) -> float:
    return sum(weight.numel() for weight in weights(module)) / (module.in_features * module.out_features)


def fuse(net: PreTrainedModel, names: Iterable[str] | None = None) -> PreTrainedModel:
    """Return a copy of ``net`` as it is exported: :func:`compact`, then some layers made dense.

    Args:
        net: in any form.
        names: of these layers; None for the layers of :func:`merged`.
    """
    fused = compact(net)
    names = list(merged(fused) if names is None else names)
    dense = [_dense(fused.get_submodule(name)) for name in names]  # all before the first factor is gone
    for name, layer in zip(names, dense, strict=True):
        replace(fused, name, layer)
    return fused


def _dense(layer: Any) -> SizedLinear:
    if hasattr(layer, "dense"):
        return SizedLinear.from_tensors(layer.dense(), layer.bias)
    return SizedLinear.from_tensors(product_of(layer), layer.bias)
