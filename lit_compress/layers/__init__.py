"""What takes a Linear's place.

A layer has a ``kind``, a ``spec()`` (JSON: the kind and the arguments of its constructor, which makes an empty one) and
``fuse()``, the cheapest equal module. What ``fuse()`` returns has a self-contained source: exports carry it.
"""

from torch import nn

from lit_compress.layers.low_rank import LowRankLinear
from lit_compress.layers.low_rank_rows import LowRankRowsLinear
from lit_compress.layers.low_rank_sparse import LowRankSparseLinear
from lit_compress.layers.masked import MaskedLinear
from lit_compress.layers.mixed_rank import MixedRankLinear
from lit_compress.layers.sized import SizedLinear

LAYERS: dict[str, type[nn.Module]] = {
    layer.kind: layer for layer in (LowRankLinear, LowRankRowsLinear, LowRankSparseLinear, SizedLinear)
}


__all__ = [
    "LAYERS",
    "LowRankLinear",
    "LowRankRowsLinear",
    "LowRankSparseLinear",
    "MaskedLinear",
    "MixedRankLinear",
    "SizedLinear",
]
