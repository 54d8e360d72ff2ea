"""A table of embeddings that is the product of two factors.

The class is self-contained on purpose: the export copies its source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

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

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {
            "kind": self.kind, "num_embeddings": self.num_embeddings, "width": self.embedding_dim,
            "rank": self.rank, "padding_idx": self.padding_idx,
        }  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return F.embedding(ids, self.left, self.padding_idx) @ self.right

    def extra_repr(self) -> str:
        """Show the sizes in ``print(net)``."""
        return f"num_embeddings={self.num_embeddings}, width={self.embedding_dim}, rank={self.rank}"
