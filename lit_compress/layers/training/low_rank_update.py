"""A trained low-rank update of a matrix that stays as it is (LoRA)."""

from __future__ import annotations

import math

import torch
from torch import nn


class LowRankUpdate(nn.Module):
    """W + scale * up @ down, a parametrization of the matrix W [out, in] of any layer (Hu et al. 2021, Eq. 3).

    The sum is made in every forward, so that a layer need not know of it.

    Attributes:
        down: [rank, in], random at first.
        up: [out, rank], zeros at first: the layer begins as it is.
    """

    def __init__(self, out_features: int, in_features: int, rank: int, scale: float, random: torch.Generator) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5), generator=random)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the updated matrix [out, in]."""
        return weight + self.scale * (self.up @ self.down)
