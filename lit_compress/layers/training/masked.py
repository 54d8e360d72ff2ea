"""Movement pruning's training layer (Sanh et al. 2020; Lagunas et al. 2021): a Linear whose rows are masked."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lit_compress.layers.training.low_rank_sparse import LowRankSparseLinear


class MaskedLinear(nn.Module):
    """y = (m[:, None] * W) x + m * bias; m in {0, 1} is set from outside, and its gradient is given to the score.

    With g = dL/dW' and W' = m[:, None] * W, the straight-through gradients are

        dL/dscore_i = sum_j g_ij W_ij        dL/dW_ij = m_i g_ij        dL/dbias_i = m_i dL/dbias'_i

    So the score of a masked row still changes. The bias is masked with its row (nn_pruning's ``bias_mask``) but
    does not enter the gradient of the score.

    Attributes:
        weight: [out_features, in_features]
        bias: [out_features] or None
        score: [out_features], learned
        mask: bool [out_features], True = keep
    """

    mask: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Take weight and bias of ``linear``; scores start at 0, and every row is kept."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.score = nn.Parameter(torch.zeros(linear.out_features))
        self.register_buffer("mask", torch.ones(linear.out_features, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        through = self.mask + (self.score - self.score.detach())  # the mask's value, the score's gradient
        bias = None if self.bias is None else self.mask * self.bias
        return F.linear(x, through[:, None] * self.weight, bias)

    def zeroed(self) -> LowRankSparseLinear:
        """Return a layer of rank 0 whose weight and bias are zero at the masked rows."""
        layer = LowRankSparseLinear(self.in_features, self.out_features, 0, bias=False)
        layer.sparse = nn.Parameter(self.mask[:, None] * self.weight.detach())
        layer.bias = None if self.bias is None else nn.Parameter(self.mask * self.bias.detach())
        return layer

    def extra_repr(self) -> str:
        """Show the sizes in ``print(net)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={int(self.mask.sum())}"
