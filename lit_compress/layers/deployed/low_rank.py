"""Linears whose weight is the product of two factors, alone, with a few full rows, or with a shared right factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        return F.linear(F.linear(x, self.right), self.left, self.bias)


class LowRankRowsLinear(nn.Module):
    """y = left (factor x) + bias, to which rows x is added at the outputs ``index``.

    Right factor and rows are one matrix, so that x is read once; adding at an index costs less than a second
    product with a selection matrix, a gather or a scatter. Two details make it up to twice as fast on a CPU: the
    product is padded to a multiple of 8 columns (with zeros, made in every forward, never stored), and the index is
    stored as int32 but used as int64.

    Attributes:
        left: [out_features, rank]; None for rank 0.
        right: [rank + rows, in_features]: the right factor, then the kept rows.
        index: int32 [rows], the output of each kept row, without repetition; a buffer, as it is not trained.
        bias: [out_features] or None.
    """

    kind = "low_rank_rows"
    index: torch.Tensor

    def __init__(self, in_features: int, out_features: int, rank: int, rows: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank, self.rows = in_features, out_features, rank, rows
        self.left = nn.Parameter(torch.empty(out_features, rank)) if rank else None
        self.right = nn.Parameter(torch.empty(rank + rows, in_features))
        self.register_parameter("weight", None)  # no weight; T5 reads the attribute before every use
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_buffer("index", torch.zeros(rows, dtype=torch.int32))

    @classmethod
    def from_rows(cls, whole: Any, kept: torch.Tensor) -> LowRankRowsLinear:
        """Return the layer with the factors and the bias of ``whole``, and some rows of its sparse matrix.

        ``kept`` says which, bool [out].
        """
        layer = cls(whole.in_features, whole.out_features, whole.rank, int(kept.sum()), bias=False)
        right = whole.sparse.detach()[kept]
        if whole.rank:
            layer.left = nn.Parameter(whole.left.detach().clone())
            right = torch.cat([whole.right.detach(), right])
        layer.right, layer.bias = nn.Parameter(right), whole.bias
        layer.index = kept.nonzero().squeeze(1).to(torch.int32)
        return layer

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, rows={self.rows}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        right = F.pad(self.right, (0, 0, 0, -(self.rank + self.rows) % 8))
        hidden = F.linear(x.reshape(-1, self.in_features), right)
        if self.left is not None:
            y = F.linear(hidden[:, : self.rank], self.left, self.bias)
        elif self.bias is not None:
            y = self.bias.to(hidden.dtype).expand(hidden.shape[0], -1).clone()
        else:
            y = hidden.new_zeros(hidden.shape[0], self.out_features)
        y.index_add_(1, self.index.long(), hidden[:, self.rank : self.rank + self.rows])
        return y.view(*x.shape[:-1], self.out_features)


class StackedLowRankLinear(LowRankLinear):
    """y = left (right x) + bias, with ``right`` of another layer of the same kind, the first of the stack.

    The stacked matrices [W_1; W_2; ...] ~ [left_1; left_2; ...] right have k (out_1 + out_2 + ... + in) parameters. The
    first layer holds ``right``, so that it is stored, counted, sharded and trained once. The others look it up there
    (:meth:`link`). right x is computed once for all layers that are called with the same x.

    Attributes:
        left: [out_features, rank]
        right: [rank, in_features], in the first layer of the stack only.
        bias: [out_features] or None; never factorized.
        first: name in the model of the first layer of the stack; empty in that layer itself.
        readers: number of layers in the stack.
    """

    kind = "stacked_low_rank"

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool = True, first: str = "", readers: int = 1
    ) -> None:
        super().__init__(in_features, out_features, rank, bias)
        self.first, self.readers = first, readers
        if first:
            del self.right
        self._holder: tuple[Any, ...] = () if first else (self,)  # in a tuple, so that it is no submodule
        self._last: tuple[Any, ...] = ()

    @classmethod
    def in_stack(
        cls, linear: Any, left: torch.Tensor, right: torch.Tensor, first: str, readers: int
    ) -> StackedLowRankLinear:
        """Return the layer with left [out, rank] and the bias of ``linear``; ``right`` [rank, in] goes to the first."""
        layer = cls(linear.in_features, linear.out_features, left.shape[1], False, first, readers)
        layer.left, layer.bias = nn.Parameter(left.contiguous()), linear.bias
        if not first:
            layer.right = nn.Parameter(right)
        return layer

    def link(self, net: nn.Module) -> None:
        """Look up the first layer of the stack in ``net``, once all layers are in their places."""
        if self.first:
            self._holder = (net.get_submodule(self.first),)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left [out_features, rank] and right [rank, in_features]."""
        return self.left, self._holder[0].right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        return F.linear(self._holder[0].reduce(x), self.left, self.bias)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return right x [..., rank] of the first layer; calls with the same x get the same result.

        It is kept until every layer of the stack has had it. Compilers see the plain product, and share it themselves.
        A parametrization makes another ``right`` at every look, which nothing says to be the same.
        """
        if torch.compiler.is_compiling() or "right" not in self._parameters:
            return F.linear(x, self.right)
        same = (
            *(0 if t.is_inference() else t._version for t in (x, self.right)),
            torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type),
        )  # fmt: skip
        last, self._last = self._last, ()
        if last and last[0] is x and last[1] is self.right and last[2] == same:
            result, left = last[3], last[4] - 1
        else:
            result, left = F.linear(x, self.right), self.readers - 1
        if left > 0:
            self._last = (x, self.right, same, result, left)
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy, without the last result, which may belong to a graph."""
        return self.__dict__ | {"_last": ()}
