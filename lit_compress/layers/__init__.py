"""Layers that replace Linears, norms, embeddings or sub-layers: training layers and deployed layers.

A layer has a ``kind``, and attributes with the names of its constructor's arguments, which make an empty layer again.
One of training/ has ``fuse()``, which returns the cheapest layer with the same outputs. That one is in deployed/, and
its source is self-contained: exports carry it. A layer with ``adopt(module, ...)`` in place of the constructor changes
the class of a module of the host model, which keeps its attributes; one that adds matrices returns them in
``counted_weights()``; one that needs another layer looks it up in ``link(net)``, once all are in their places.

models/surgery.py and the methods put layers into models. Begin with deployed/low_rank.py and
training/low_rank_sparse.py.
"""

from typing import Any

from lit_compress.layers.deployed.adopted import NarrowEmbedding, SomeHeads, SomeT5Heads, StreamBlock
from lit_compress.layers.deployed.low_rank import LowRankLinear, LowRankRowsLinear, StackedLowRankLinear
from lit_compress.layers.deployed.narrow import NarrowLinear, NarrowNorm
from lit_compress.layers.deployed.removed import Removed
from lit_compress.layers.deployed.sized import Int8Embedding, SizedEmbedding, SizedLinear, SizedNorm
from lit_compress.layers.training.low_rank_sparse import LowRankSparseLinear
from lit_compress.layers.training.projected import BasisChange, ProjectedLinear, ProjectedNorm, StreamNorm

LAYER_TYPES: tuple[type[Any], ...] = (  # all that a structure can name
    BasisChange, Int8Embedding, LowRankLinear, LowRankRowsLinear, LowRankSparseLinear,
    NarrowEmbedding, NarrowLinear, NarrowNorm, ProjectedLinear, ProjectedNorm, Removed, SizedEmbedding,
    SizedLinear, SizedNorm, SomeHeads, SomeT5Heads, StackedLowRankLinear, StreamBlock, StreamNorm,
)  # fmt: skip
LAYERS = {layer.kind: layer for layer in LAYER_TYPES}
