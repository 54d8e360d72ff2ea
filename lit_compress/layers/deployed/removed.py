"""The placeholder for a removed module."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

Returns = Literal["input", "zero", "pair", "triple"]


class Removed(nn.Module):
    """Replaces a module that was removed, so that the model's code around it still runs.

    Attributes:
        returns: what a call returns: ``input`` the first argument; ``zero`` a zero, to which the residual is added;
            ``pair`` a zero and None, in place of an attention's states and weights; ``triple`` a zero, the bias of
            relative positions that it was given, and None.
        bias: [features], returned in place of the zero where the removed sub-layer leaves its bias; None elsewhere.
    """

    kind = "nothing"

    def __init__(self, returns: str, features: int = 0) -> None:
        super().__init__()
        self.returns = returns
        self.bias = nn.Parameter(torch.empty(features)) if features else None

    @property
    def features(self) -> int:
        """Number of values of the bias; 0 for none."""
        return 0 if self.bias is None else len(self.bias)

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Accept the arguments of the removed module and return what ``returns`` says."""
        x = args[0] if args else kwargs["hidden_states"]
        if self.returns == "input":
            return x
        y = x.new_zeros(1) if self.bias is None else self.bias.to(x.dtype)
        if self.returns == "triple":
            return y, kwargs.get("position_bias"), None
        return y if self.returns == "zero" else (y, None)
