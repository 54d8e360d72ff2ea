"""Smaller tables of embeddings: the product of two factors, or rows of 8-bit integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class LowRankEmbedding(nn.Module):
    """y = left[id] right, in place of y = W[id] with a table W [num_embeddings, width] ~ left @ right.

    Attributes:
        left: [num_embeddings, rank]
        right: [rank, width]
    """

    kind = "low_rank_embedding"

    def __init__(self, num_embeddings: int, width: int, rank: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.rank = num_embeddings, width, rank
        self.padding_idx = padding_idx
        self.left = nn.Parameter(torch.empty(num_embeddings, rank))
        self.right = nn.Parameter(torch.empty(rank, width))

    @classmethod
    def from_factors(cls, table: Any, left: torch.Tensor, right: torch.Tensor) -> LowRankEmbedding:
        """Return the layer with factors left [num_embeddings, rank] and right [rank, width] in place of ``table``."""
        layer = cls(table.num_embeddings, table.embedding_dim, 0, getattr(table, "padding_idx", None))
        layer.rank, layer.left, layer.right = left.shape[1], nn.Parameter(left), nn.Parameter(right)
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return F.embedding(ids, self.left, self.padding_idx) @ self.right


class Int8Embedding(nn.Module):
    """y = scale[id] weight[id]: every row of the table as integers from -127 to 127, and one scale.

    Attributes:
        weight: int8 [num_embeddings, width].
        scale: [num_embeddings], in the dtype of the model.
    """

    kind = "int8_embedding"

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, width
        self.weight = nn.Parameter(torch.zeros(num_embeddings, width, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(num_embeddings), requires_grad=False)

    @classmethod
    def from_table(cls, table: torch.Tensor) -> Int8Embedding:
        """Return the layer nearest to ``table`` [num_embeddings, width]: no value is off by more than scale / 2."""
        layer = cls(*table.shape)
        scale = table.detach().abs().amax(1) / 127
        steps = (table.detach() / scale.clamp_min(torch.finfo(table.dtype).tiny)[:, None]).round().clamp(-127, 127)
        layer.weight = nn.Parameter(steps.to(torch.int8), requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids][..., None]
