"""What stands where a module was taken out.

The class is self-contained on purpose: the export copies its source into the modelling file, so that an
exported folder loads where this package is not installed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

Returns = Literal["input", "zero", "pair"]


class Nothing(nn.Module):
    """Computes nothing, so that the code around it goes on without the module.

    Attributes:
        returns: ``input`` what it is given first; ``zero`` a zero, to which the residual is added; ``pair`` a zero and
            None, as an attention returns states and weights.
    """

    kind = "nothing"

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {"kind": self.kind, "returns": self.returns}

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        """Take what the module took."""
        x = args[0] if args else kwargs["hidden_states"]
        if self.returns == "input":
            return x
        zero = x.new_zeros(1)
        return zero if self.returns == "zero" else (zero, None)

    def extra_repr(self) -> str:
        """Show what it returns in ``print(net)``."""
        return f"returns={self.returns}"
