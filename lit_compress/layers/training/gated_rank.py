"""FLOP's training layer: two factors with a gate on every rank between them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lit_compress.layers.deployed.low_rank import LowRankLinear
from lit_compress.layers.training.low_rank_sparse import as_linear


class GatedRankLinear(LowRankLinear):
    """y = left diag(z) right x + bias = sum_k z_k left_k (right_k x) + bias.

    Attributes:
        z: values of the ranks' gates [rank], set from outside; a buffer, for checkpoints of validated models.
    """

    z: torch.Tensor

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, rank, bias)
        self.register_buffer("z", torch.ones(rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in] to [..., out]; gates multiply the right factor, usually smaller than its outputs."""
        return F.linear(F.linear(x, self.right * self.z[:, None]), self.left, self.bias)

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """Return the factors of the open ranks, with their gates in the right one; the matrix where it is smaller."""
        open_ = self.z > 0
        left, right = self.left[:, open_].contiguous(), self.right[open_] * self.z[open_, None]
        if left.numel() + right.numel() < self.in_features * self.out_features:
            return LowRankLinear.from_factors(self, left, right)
        return as_linear((left.double() @ right.double()).to(left.dtype), self.bias)
