"""A Linear whose sizes differ from the model's configuration.

The class is self-contained on purpose: the export copies its source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class SizedLinear(nn.Module):
    """y = weight x + bias, smaller than the model's configuration says because heads or neurons were removed.

    Attributes:
        weight: [out_features, in_features]; either may be 0.
        bias: [out_features] or None.
    """

    kind = "sized"

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @classmethod
    def from_tensors(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> SizedLinear:
        """Return the layer with weight [out, in] and bias [out]."""
        layer = cls(weight.shape[1], weight.shape[0], bias is not None)
        layer.weight = nn.Parameter(weight.detach().contiguous())
        layer.bias = None if bias is None else nn.Parameter(bias.detach())
        return layer

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {
            "kind": self.kind, "in_features": self.in_features, "out_features": self.out_features,
            "bias": self.bias is not None,
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight, self.bias)
