"""A smaller table of embeddings: rows of 8-bit integers."""

from __future__ import annotations

import torch
from torch import nn


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
        self.weight = nn.Parameter(torch.zeros(num_embeddings, width, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(num_embeddings), requires_grad=False)

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
