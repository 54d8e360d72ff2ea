"""Linears that read the same input and share one right factor: query, key and value; gate and up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class StackedLowRankLinear(nn.Module):
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
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.first, self.readers = first, readers
        self.left = nn.Parameter(torch.empty(out_features, rank))
        if not first:
            self.right = nn.Parameter(torch.empty(rank, in_features))
        self.register_parameter("weight", None)  # no weight; T5 reads the attribute before every use
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self._holder: tuple[Any, ...] = () if first else (self,)  # in a tuple, so that it is no submodule
        self._last: tuple[Any, ...] = ()

    @classmethod
    def from_factors(
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

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}"

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
