"""A Linear whose sizes differ from the model's configuration.

The class is self-contained on purpose: the export copies its source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SizedLinear(nn.Linear):
    """y = weight x + bias, smaller than the model's configuration says because heads or neurons were removed.

    To other libraries it is the Linear that it is: LoRA of peft adapts it.

    Attributes:
        weight: [out_features, in_features]; either may be 0.
        bias: [out_features] or None.
    """

    kind = "sized"

    def reset_parameters(self) -> None:
        """Draw no random values: a file or the caller has all."""

    @classmethod
    def from_tensors(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> SizedLinear:
        """Return the layer with weight [out, in] and bias [out]."""
        layer = cls(weight.shape[1], weight.shape[0], bias is not None)
        layer.weight = nn.Parameter(weight.detach().contiguous())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach())
        return layer

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {
            "kind": self.kind, "in_features": self.in_features, "out_features": self.out_features,
            "bias": self.bias is not None,
        }  # fmt: skip
