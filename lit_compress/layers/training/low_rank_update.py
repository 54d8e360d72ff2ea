"""A trained low-rank update of a matrix that stays unchanged (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class LowRankUpdate(nn.Module):
    """W + scale * up @ down, a parametrization of the matrix W [out, in] of any layer (Hu et al. 2021, Eq. 3).

    A layer need not know of it. ``F.linear(x, W)`` becomes W x + scale * up (down x), so that no gradient of the size
    of W is ever computed; any other function gets the sum.

    Attributes:
        down: [rank, in], random at first.
        up: [out, rank], zeros at first: the layer begins as it is.
    """

    def __init__(self, out_features: int, in_features: int, rank: int, scale: float, random: torch.Generator) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5), generator=random)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated matrix [out, in], which is summed only where it is not used by ``F.linear``."""
        updated = weight.as_subclass(_Updated)
        updated.update = self
        return updated

    def merged(self, weight: Tensor) -> Tensor:
        """Return the sum [out, in] of W and its update."""
        return weight + self.scale * (self.up @ self.down)


class _Updated(Tensor):
    """The matrix W of a layer, which functions see with its update."""

    update: LowRankUpdate

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not isinstance(args[0], cls):
                x, weight, update = args[0], args[1], args[1].update
                low_rank = F.linear(update.scale * F.linear(x, update.down), update.up)
                return func(x, weight, *args[2:], **(kwargs or {})) + low_rank
            whole = tree_map(lambda value: value.update.merged(value) if isinstance(value, cls) else value, args)
            return func(*whole, **(kwargs or {}))
