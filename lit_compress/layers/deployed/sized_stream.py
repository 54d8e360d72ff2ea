"""Embeddings and LayerNorms of a residual stream from which dimensions were removed.

The classes are self-contained on purpose: the export copies their source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "num_embeddings": self.num_embeddings, "width": self.embedding_dim}

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

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return {"kind": self.kind, "width": self.width, "eps": self.eps}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., width]."""
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
