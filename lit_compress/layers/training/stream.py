"""SP3's training layers for pre-norm models: a gated norm, and a change of the residual stream's basis (section 3.5).

In training the stream has its full width and every basis has gates; an export has the open directions only. The block
that uses them is in layers/deployed/stream_block.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class StreamNorm(nn.Module):
    """y = z * x;  z * y / sqrt(|y|^2 / features + eps), in place of the norm before a sub-layer.

    Weight and bias of the original norm have been multiplied into the Linears that read it.

    Attributes:
        z: [features], values of the directions' gates in this forward, set from outside; ones at first.
    """

    kind = "stream_norm"
    z: torch.Tensor

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        self.register_buffer("z", torch.ones(features))

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "features": self.features, "eps": self.eps}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        y = self.z * (x if x.dtype == torch.float64 else x.float())
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.z * y).to(x.dtype)


class BasisChange(nn.Module):
    """weight (z * x): changes the basis of the residual stream.

    Attributes:
        weight: [features, features], U'^T U at first.
        z: [features], values of the gates on the directions of the former basis; ones at first.
    """

    kind = "junction"
    z: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.empty(features, features))
        self.register_buffer("z", torch.ones(features))

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "features": self.features}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        return F.linear(self.z.to(x.dtype) * x, self.weight)
