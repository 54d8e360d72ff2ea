"""Movement pruning's training layers (Sanh et al. 2020; Lagunas et al. 2021): Linears with masked rows or blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lit_compress.layers.training.low_rank_sparse import LowRankSparseLinear, as_linear


class BlockMaskedLinear(nn.Module):
    """y = (M * W) x + bias; M is one m in {0, 1} per block of W, set from outside, and gives its gradient to the score.

    With g = dL/dW' and W' = M * W, the straight-through gradients are

        dL/dscore_B = sum over the weights ij of block B of g_ij W_ij        dL/dW_ij = M_ij g_ij

    So the score of a masked block still changes. Blocks of (1, in) are rows, of (out, 1) columns; the bias is kept.

    Attributes:
        weight: [out_features, in_features]
        bias: [out_features] or None
        score: [blocks], learned; row by row of blocks
        mask: bool [blocks], True = keep
        block: height and width of a block.
        copies: that many matrices are in the weight, one below the other, and share their scores and masks.
    """

    mask: torch.Tensor

    def __init__(self, linear: nn.Linear, block: tuple[int, int], copies: int = 1) -> None:
        """Take weight and bias of ``linear``; scores start at 0, and every block is kept."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        assert self.out_features % (block[0] * copies) == self.in_features % block[1] == 0
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.copies = block, copies
        blocks = self.out_features * self.in_features // (block[0] * block[1] * copies)
        self.score = nn.Parameter(torch.zeros(blocks))
        self.register_buffer("mask", torch.ones(blocks, dtype=torch.bool))

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [blocks] as [rows of blocks, columns of blocks]."""
        return values.view(-1, self.in_features // self.block[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        through = self.mask + (self.score - self.score.detach())  # the mask's value, the score's gradient
        return F.linear(x, self._product(through), self.bias)

    def _product(self, values: torch.Tensor) -> torch.Tensor:
        grid, (height, width) = self.grid(values), self.block
        blocks = self.weight.reshape(self.copies, grid.shape[0], height, grid.shape[1], width)
        return (blocks * grid[None, :, None, :, None]).reshape(self.out_features, self.in_features)

    @torch.no_grad()
    def zeroed(self) -> nn.Module:
        """Return the Linear whose masked blocks are zero."""
        return as_linear(self._product(self.mask), self.bias)


class MaskedLinear(BlockMaskedLinear):
    """y = (m[:, None] * W) x + m * bias: the blocks are rows, and the bias is masked with its row.

    That is nn_pruning's ``bias_mask``; the bias does not enter the gradient of the score.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, (1, linear.in_features))

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
