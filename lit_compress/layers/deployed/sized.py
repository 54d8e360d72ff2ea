"""Linears, embeddings and LayerNorms that are smaller than the configuration of the model says."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SizedLinear(nn.Linear):
    """y = weight x + bias, smaller than the model's configuration says because heads or neurons were removed.

    To other libraries it is the Linear that it is: LoRA of peft adapts it.

    Attributes:
        weight: [out_features, in_features]; either may be 0.
        bias: [out_features] or None.
    """

    kind = "sized"

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)

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


class SizedEmbedding(nn.Module):
    """A table of embeddings whose vectors are shorter than the model's configuration says.

    Attributes:
        weight: [num_embeddings, width].
    """

    kind = "sized_embedding"

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, width
        self.weight = nn.Parameter(torch.empty(num_embeddings, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return F.embedding(ids, self.weight)


class SizedNorm(nn.Module):
    """A LayerNorm over fewer dimensions than the model's configuration says.

    Attributes:
        weight, bias: [width].
    """

    kind = "sized_norm"

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., width]."""
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
