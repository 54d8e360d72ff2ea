"""Training form -> the cheapest equal module, at every site."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from lit_compress.cut import cut_constants
from lit_compress.layers import LAYERS, MaskedLinear, SizedLinear
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fuse(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``net`` in deployed form; its outputs in evaluation mode are those of ``net``.

    Heads and neurons that have become constants are cut away, then every layer turns into the cheapest equal one.
    """
    fused = copy.deepcopy(net)
    cut = cut_constants(fused)
    for name, module in list(fused.named_modules()):
        if isinstance(module, (*LAYERS.values(), MaskedLinear)):
            smallest = module.fuse()  # type: ignore[operator]
            if name in cut and isinstance(smallest, nn.Linear):
                smallest = SizedLinear.from_tensors(smallest.weight, smallest.bias)
            replace(fused, name, smallest)
    return fused.eval()
