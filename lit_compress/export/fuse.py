"""Training form -> the cheapest equal module, at every site."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from lit_compress.layers import LowRankLinear
from lit_compress.surgery import replace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fuse(net: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``net`` in deployed form; its outputs in evaluation mode are those of ``net``."""
    fused = copy.deepcopy(net)
    for name, module in list(fused.named_modules()):
        if isinstance(module, LowRankLinear):
            replace(fused, name, module.fuse())
    return fused.eval()
