"""What takes a Linear's place (or a LayerNorm's, an embedding's, a sub-layer's).

A layer has a ``kind``, a ``spec()`` (JSON: the kind and the arguments of its constructor, which makes an empty one) and
``fuse()``, the cheapest equal module. What ``fuse()`` returns has a self-contained source: exports carry it. One with
``adopt(module, ...)`` in place of that constructor changes a module of the host model, which keeps what it has.
"""

from torch import nn

from lit_compress.layers.gated import GatedLinear, GatedNorm
from lit_compress.layers.hard_concrete import HardConcrete
from lit_compress.layers.low_rank import LowRankLinear
from lit_compress.layers.low_rank_rows import LowRankRowsLinear
from lit_compress.layers.low_rank_sparse import LowRankSparseLinear
from lit_compress.layers.masked import MaskedLinear
from lit_compress.layers.mixed_rank import MixedRankLinear
from lit_compress.layers.narrow import NarrowLinear, NarrowNorm
from lit_compress.layers.nothing import Nothing
from lit_compress.layers.projected import ProjectedLinear, ProjectedNorm
from lit_compress.layers.sized import SizedLinear
from lit_compress.layers.sized_stream import SizedEmbedding, SizedNorm
from lit_compress.layers.stream import Junction, StreamBlock, StreamNorm, StreamTable

_KINDS = (
    Junction, LowRankLinear, LowRankRowsLinear, LowRankSparseLinear, NarrowLinear, NarrowNorm, Nothing, ProjectedLinear,
    ProjectedNorm, SizedEmbedding, SizedLinear, SizedNorm, StreamBlock, StreamNorm, StreamTable,
)  # fmt: skip
LAYERS: dict[str, type[nn.Module]] = {layer.kind: layer for layer in _KINDS}


__all__ = [
    "LAYERS",
    "GatedLinear",
    "GatedNorm",
    "HardConcrete",
    "Junction",
    "LowRankLinear",
    "LowRankRowsLinear",
    "LowRankSparseLinear",
    "MaskedLinear",
    "MixedRankLinear",
    "NarrowLinear",
    "NarrowNorm",
    "Nothing",
    "ProjectedLinear",
    "ProjectedNorm",
    "SizedEmbedding",
    "SizedLinear",
    "SizedNorm",
    "StreamBlock",
    "StreamNorm",
    "StreamTable",
]
