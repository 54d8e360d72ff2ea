"""The matrices of a model's projections, float64: bases of hidden states and heads, or identities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_compress.models.residual_stream import has_head_projections, residual_stream
from lit_compress.models.sites import head_width, size_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Bases:
    """The projections of a model, float64.

    Attributes:
        sites: U [d, d] of every site of the residual stream that can have one.
        query, key, value: P_Q, P_K, P_V = P_O^T [heads, d_h, d_h] of every attention; empty where heads cannot be
            projected.
    """

    sites: Sequence[Tensor]
    query: Sequence[Tensor]
    key: Sequence[Tensor]
    value: Sequence[Tensor]


def relative_positions(net: PreTrainedModel) -> int:
    """Return how many relative positions the attentions of ``net`` project to queries and keys (DeBERTa); else 0."""
    relative = getattr(net.config, "relative_attention", False)
    return size_at(net.base_model, "encoder.rel_embeddings")[1] if relative else 0


def identity_bases(net: PreTrainedModel, group: int = 1) -> Bases:
    """Return identity matrices as projections (the paper's Table 3 without PCA)."""
    stream, heads = residual_stream(net, group), net.config.num_attention_heads
    one, small = (torch.eye(size).double() for size in (net.config.hidden_size, head_width(net, "encoder")))
    count = len(stream.attentions) * has_head_projections(net)
    return Bases([one] * len(stream.rotatable), *([small.expand(heads, -1, -1)] * count for _ in range(3)))
