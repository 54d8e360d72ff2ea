"""Linears, embeddings and LayerNorms that are smaller than the configuration says; embeddings of 8-bit integers."""

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


class Int8Embedding(nn.Module):
    """y = scale[id] weight[id]: every row of the table as integers from -127 to 127, and one scale.

    Attributes:
        weight: int8 [num_embeddings, width].
        scale: [num_embeddings], in the dtype of the model.
    """

    kind = "int8_embedding"

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, width
        self.scale = nn.Parameter(torch.zeros(num_embeddings), requires_grad=False)  # first: the model's dtype
        self.weight = nn.Parameter(torch.zeros(num_embeddings, width, dtype=torch.int8), requires_grad=False)

    @classmethod
    def from_table(cls, table: torch.Tensor) -> Int8Embedding:
        """Return the layer nearest to ``table`` [num_embeddings, width]: no value is off by more than scale / 2."""
        layer = cls(*table.shape)
        scale = table.detach().abs().amax(1) / 127
        steps = (table.detach() / scale.clamp_min(torch.finfo(table.dtype).tiny)[:, None]).round().clamp(-127, 127)
        layer.weight = nn.Parameter(steps.to(torch.int8), requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        return layer

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        return f"{self.num_embeddings}, {self.embedding_dim}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids][..., None]
