"""A Linear whose weight is the product of two factors.

The class is self-contained on purpose: the export copies its source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class LowRankLinear(nn.Module):
    """y = left (right x) + bias, in place of y = W x + bias with W [out, in] ~ left @ right.

    Attributes:
        left: [out_features, rank]
        right: [rank, in_features]
        bias: [out_features] or None; never factorized.
    """

    kind = "low_rank"

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.left = nn.Parameter(torch.empty(out_features, rank))
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.register_parameter("weight", None)  # no weight; T5 reads the attribute before every use
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @classmethod
    def from_factors(cls, linear: Any, left: torch.Tensor, right: torch.Tensor) -> LowRankLinear:
        """Return the layer with factors left [out, rank], right [rank, in] and the bias of ``linear``."""
        layer = cls(linear.in_features, linear.out_features, left.shape[1], bias=False)
        layer.left, layer.right, layer.bias = nn.Parameter(left), nn.Parameter(right), linear.bias
        return layer

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left [out_features, rank] and right [rank, in_features]."""
        return self.left, self.right

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {
            "kind": self.kind, "in_features": self.in_features, "out_features": self.out_features,
            "rank": self.rank, "bias": self.bias is not None,
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        return F.linear(F.linear(x, self.right), self.left, self.bias)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(net)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
