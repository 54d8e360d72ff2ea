"""LoSparse's training layer (Li et al. 2023, Eq. 5): two factors and a matrix whose rows are pruned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lit_compress.layers.deployed.low_rank import LowRankLinear, LowRankRowsLinear


def as_linear(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    """Return the Linear of ``weight`` [out, in] and ``bias`` [out]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    linear.register_parameter("bias", bias)
    return linear


class LowRankSparseLinear(nn.Module):
    """y = left (right x) + sparse x + bias, in place of y = W x + bias with W [out, in] = left @ right + sparse.

    A row of ``sparse`` is an output neuron; a pruned row is exactly zero, and may come back. With rank 0 there is
    only the sparse matrix, which is then W itself.

    Attributes:
        left: [out_features, rank]; None for rank 0.
        right: [rank, in_features]; None for rank 0.
        sparse: [out_features, in_features]
        bias: [out_features] or None; never pruned.
    """

    kind = "low_rank_sparse"

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.left = nn.Parameter(torch.empty(out_features, rank)) if rank else None
        self.right = nn.Parameter(torch.empty(rank, in_features)) if rank else None
        self.sparse = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("weight", None)  # no weight; T5 reads the attribute before every use
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @classmethod
    def from_factors(cls, linear: Any, left: torch.Tensor, right: torch.Tensor) -> LowRankSparseLinear:
        """Return the layer for ``linear`` with left [out, rank], right [rank, in] and sparse = W - left @ right."""
        layer = cls(linear.in_features, linear.out_features, 0, bias=False)
        weight, layer.rank, layer.bias = linear.weight.detach(), left.shape[1], linear.bias
        if layer.rank:
            layer.left, layer.right = nn.Parameter(left), nn.Parameter(right)
            weight = weight - left @ right
        layer.sparse = nn.Parameter(weight)
        return layer

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """Return the smallest layer with the same outputs: factors alone, factors with the kept rows, or a Linear.

        The Linear is for matrices that would not be smaller otherwise.
        """
        kept = self.sparse.ne(0).any(1)  # a sum could cancel
        stored = self.rank * (self.in_features + self.out_features) + int(kept.sum()) * self.in_features
        if stored >= self.out_features * self.in_features:
            low_rank = 0.0 if self.left is None or self.right is None else self.left @ self.right
            return as_linear(low_rank + self.sparse, self.bias)
        if self.left is not None and self.right is not None and not kept.any():
            return LowRankLinear.from_factors(self, self.left.detach(), self.right.detach())
        return LowRankRowsLinear.from_rows(self, kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        y = F.linear(x, self.sparse, self.bias)
        if self.left is None or self.right is None:
            return y
        return y + F.linear(F.linear(x, self.right), self.left)
