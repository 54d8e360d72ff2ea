"""BertForSequenceClassification with compressed Linears, as config.structure lists them. Written by lit_compress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification


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



LAYERS = {layer.kind: layer for layer in [LowRankLinear]}


class CompressedBertForSequenceClassification(BertForSequenceClassification):
    """BertForSequenceClassification with another layer at the sites of config.structure."""

    def __init__(self, config):
        for name, value in getattr(config, "activations", {}).items():
            setattr(config, name, value)
        super().__init__(config)
        for name, spec in config.structure.items():
            parent, _, child = name.rpartition(".")
            sizes = {key: value for key, value in spec.items() if key != "kind"}
            if spec["kind"] == "attributes":
                for key, value in sizes.items():
                    setattr(self.get_submodule(name), key, value)
            elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
                layer.adopt(self.get_submodule(name), **sizes)
            else:
                setattr(self.get_submodule(parent), child, layer(**sizes))
        for module in self.modules():
            if hasattr(module, "link"):
                module.link(self)

    def save_pretrained(self, *args, **kwargs):
        """Save the folder so that it loads with this code only, as it was."""
        activations = getattr(self.config, "activations", {})
        for name, value in activations.items():
            setattr(self.config, name, "compressed: load this folder with trust_remote_code=True" if isinstance(value, str) else value)
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            for name, value in activations.items():
                setattr(self.config, name, value)
