"""LPAF's mixed-rank layer (Ren & Zhu 2023, Eq. 12): a coin chooses the factors or the sparse matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from lit_compress.layers.deployed.low_rank import LowRankLinear


class _Unused(torch.autograd.Function):
    """Returns the first tensor; the gradients of the others are zeros."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.unused = unused
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.unused)


class MixedRankLinear(LowRankLinear):
    """x_out = (1 - z) left (right x) + z W x + bias, z in {0, 1} per matrix and forward.

    W is frozen and not in the state dict: it is read again from the pruned model, so that checkpoints have the size
    of the deployed model. In evaluation mode only the factors are used.

    Attributes:
        weight: the frozen sparse matrix W [out, in]; None once p has reached zero.
        z: the coin of this forward, True for W; two coins when the batch holds both forwards, one after the other.
    """

    weight: torch.Tensor | None
    z: tuple[bool, ...] = (False,)

    @classmethod
    def from_factors(cls, linear: Any, left: torch.Tensor, right: torch.Tensor) -> MixedRankLinear:
        """Return the layer with these factors and the bias and (frozen) weight of ``linear``."""
        layer = super().from_factors(linear, left, right)
        assert isinstance(layer, MixedRankLinear)
        del layer.weight
        layer.register_buffer("weight", linear.weight.detach(), persistent=False)
        return layer

    def fuse(self) -> LowRankLinear:
        """Return the deployed layer, which has the factors only."""
        return LowRankLinear.from_factors(self, self.left.detach(), self.right.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [b, ..., in] to [b, ..., out]; with two coins each half of dim 0 has its own."""
        if not self.training or not any(self.z):
            return super().forward(x)
        if len(set(self.z)) == 1:
            return self._dense(x)
        return torch.cat(
            [
                self._dense(half) if z else super(MixedRankLinear, self).forward(half)
                for z, half in zip(self.z, x.chunk(len(self.z)), strict=True)
            ]
        )

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        # Left and right must get a gradient (zero) in every step: DDP waits for it, and AdamW would
        # otherwise skip them on one device but not on two.
        return _Unused.apply(F.linear(x, self.weight, self.bias), self.left, self.right)

    def release(self) -> None:
        """Drop W: from now on only the factors are used."""
        self.weight = None
        self.z = (False,)
