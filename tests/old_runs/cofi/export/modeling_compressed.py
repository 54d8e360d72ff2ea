"""BertForSequenceClassification with compressed Linears, as config.structure lists them. Written by lit_compress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification


class SizedLinear(nn.Module):
    """y = weight x + bias, smaller than the net's configuration says because heads or neurons were removed.

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


class SizedEmbedding(nn.Module):
    """A table of embeddings whose vectors are shorter than the net's configuration says.

    Attributes:
        weight: [num_embeddings, width].
    """

    kind = "sized_embedding"

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, width
        self.weight = nn.Parameter(torch.empty(num_embeddings, width))

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "num_embeddings": self.num_embeddings, "width": self.embedding_dim}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return F.embedding(ids, self.weight)


class SizedNorm(nn.Module):
    """A LayerNorm over fewer dimensions than the net's configuration says.

    Attributes:
        weight, bias: [width].
    """

    kind = "sized_norm"

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "width": self.width, "eps": self.eps}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., width]."""
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)



LAYERS = {layer.kind: layer for layer in [SizedLinear, SizedEmbedding, SizedNorm]}


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
