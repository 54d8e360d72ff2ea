"""Training form -> what the method kept -> the cheapest equal module, at every site."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from lit_compress.budget import dense_sizes, weights
from lit_compress.condense import fuse_projections, is_projected
from lit_compress.cut import cut_constants
from lit_compress.layers import LAYERS, LowRankRowsLinear, MaskedLinear, SizedLinear
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Share of a matrix's parameters, so of its FLOPs, above which factors and rows may be slower than the matrix.
# One thread of an AMD EPYC, 384 x 384 to 3072 x 768 (benchmarks/pruning_speed.py): at 32 x 128 tokens 0.63 - 0.85 of
# the matrix's time at 0.7, 0.74 - 1.00 at 0.8, 0.82 - 1.17 at 0.9.
MERGE = 0.7


def compact(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``net`` that stores what the method kept; its outputs in evaluation mode are those of ``net``.

    Heads and neurons that have become constants are cut away, then every layer turns into the smallest equal one.
    """
    small = copy.deepcopy(net)
    if is_projected(small):
        fuse_projections(small)
    for name, module in list(small.named_modules()):
        if isinstance(module, MaskedLinear):
            replace(small, name, module.zeroed())
    cut_constants(small)
    dense = dense_sizes(small)
    for name, module in list(small.named_modules()):
        if isinstance(module, tuple(LAYERS.values())):
            smallest = module.fuse()  # type: ignore[operator]
            if isinstance(smallest, nn.Linear) and smallest.weight.numel() != dense[name]:
                smallest = SizedLinear.from_tensors(smallest.weight, smallest.bias)
            replace(small, name, smallest)
    return small.eval()


def merged(net: PreTrainedModel) -> dict[str, float]:
    """Return {name: share of its matrix's parameters} of the layers with rows that would be no faster than dense."""
    shares = {
        name: sum(weight.numel() for weight in weights(module)) / (module.in_features * module.out_features)
        for name, module in net.named_modules()
        if isinstance(module, LowRankRowsLinear) and module.rows
    }
    return {name: share for name, share in shares.items() if share > MERGE}


def fuse(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``net`` in deployed form: :func:`compact`, and layers no faster than dense ones merged."""
    fused = compact(net)
    for name in merged(fused):
        layer = fused.get_submodule(name)
        replace(fused, name, SizedLinear.from_tensors(layer.dense(), layer.bias))  # type: ignore[operator]
    return fused
