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
        return _Updated(weight, self)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the sum [out, in] of W and its update."""
        return weight + self.scale * (self.up @ self.down)


class _Updated(Tensor):
    """The matrix W of a layer, which functions see with its update; it has no values of its own."""

    weight: Tensor
    update: LowRankUpdate

    @staticmethod
    def __new__(cls, weight: Tensor, update: LowRankUpdate) -> _Updated:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: Tensor, update: LowRankUpdate) -> None:
        self.weight, self.update = weight, update

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def whole(value: Any) -> Any:
            return value.update.merged(value.weight) if isinstance(value, cls) else value

        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and [isinstance(value, cls) for value in args[:2]] == [False, True]:
                x, weight, update = args[0], args[1].weight, args[1].update
                low_rank = F.linear(update.scale * F.linear(x, update.down), update.up)
                return func(x, weight, *args[2:], **(kwargs or {})) + low_rank
            return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # type: ignore[override]
        """Refuse to compute with no values; functions of torch get the sum."""
        raise NotImplementedError(f"{func} of a matrix with an update")
