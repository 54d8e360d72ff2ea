"""Low-rank Linears in pivot form: some rows of the matrix, and the others as sums of them.

The class is self-contained but for the one that it extends: the export copies the source of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lit_compress.layers.deployed.stacked_low_rank import StackedLowRankLinear


class PivotLinear(StackedLowRankLinear):
    """y = [right x; rest (first rows of right x)] in the order ``order``, + bias.

    A matrix left @ right of rank k has k rows, the pivots, of which all others are sums: they stand in ``right``, and
    ``rest`` says how to sum them, so that k (out + in - k) parameters do for k (out + in). Layers may share ``right``
    as those of the class it extends do; then the pivots are rows of any of them. Full rows that are not sums of the
    pivots (LoSparse) stand in ``right``, too, behind the pivots.

    Attributes:
        right: [rank + rows, in_features], in the first layer of a stack only.
        rest: [rest, rank]
        order: int32 [out_features]; output i is number ``order[i]`` of right x and what follows from it; a buffer.
        bias: [out_features] or None.
        first, readers: as in the class it extends.
    """

    kind = "pivot"
    order: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        rest: int,
        rows: int = 0,
        bias: bool = True,
        first: str = "",
        readers: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, rank, bias, first, readers)
        del self.left
        self.rows = rows
        self.rest = nn.Parameter(torch.empty(rest, rank))
        if not first:
            self.right = nn.Parameter(torch.empty(rank + rows, in_features))
        self.register_buffer("order", torch.zeros(out_features, dtype=torch.int32))

    @classmethod
    def from_parts(
        cls,
        right: torch.Tensor,
        rest: torch.Tensor,
        order: torch.Tensor,
        bias: nn.Parameter | None,
        first: str = "",
        readers: int = 1,
    ) -> PivotLinear:
        """Return the layer with right [rank + rows, in], rest [rest, rank] and order [out]."""
        rank = rest.shape[1]
        layer = cls(right.shape[1], len(order), rank, len(rest), len(right) - rank, False, first, readers)
        layer.rest, layer.order, layer.bias = nn.Parameter(rest.contiguous()), order.to(torch.int32), bias
        if not first:
            layer.right = nn.Parameter(right.contiguous())
        return layer

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left [out_features, rank + rows] and right [rank + rows, in_features]."""
        right = self._holder[0].right
        one = torch.eye(len(right), dtype=right.dtype, device=right.device)
        return torch.cat([one, F.pad(self.rest, (0, self.rows))])[self.order], right

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        """Return the matrix [out_features, in_features] that the layer applies."""
        right = self._holder[0].right
        return torch.cat([right, self.rest @ right[: self.rank]])[self.order]

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of the constructor, as JSON."""
        return super().spec() | {"rest": len(self.rest), "rows": self.rows}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        hidden = self._holder[0].reduce(x)
        y = torch.cat([hidden, F.linear(hidden[..., : self.rank], self.rest)], -1).index_select(-1, self.order)
        return y if self.bias is None else y + self.bias
