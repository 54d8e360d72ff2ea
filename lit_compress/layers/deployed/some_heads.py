"""An attention that has lost heads, where all layers read one bias of relative positions (MPNet).

The class is self-contained on purpose: the export copies its source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SomeHeads(nn.Module):
    """MPNet's attention with some of the model's heads: it takes their columns of the shared bias.

    Attributes:
        heads: numbers of its heads in the dense model, rising.
    """

    kind = "some_heads"
    heads: list[int]
    attention_head_size: int

    @classmethod
    def adopt(cls, attention: Any, heads: list[int]) -> None:
        """Change the class of ``attention``, a module of the host model, in place; its matrices have these heads."""
        if not isinstance(attention, cls):
            attention.__class__ = type(f"Some{type(attention).__name__}", (cls, type(attention)), {})
        attention.heads, attention.num_attention_heads = heads, len(heads)
        attention.all_head_size = len(heads) * attention.attention_head_size

    def spec(self) -> dict[str, Any]:
        """Return the kind and the arguments of :meth:`adopt`, as JSON."""
        return {"kind": self.kind, "heads": self.heads}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Map [batch, length, width] to a tuple with the same; the bias is [batch, dense heads, length, length]."""
        if position_bias is not None:
            # an index would be copied to the device in every forward, which a CUDA graph cannot record
            position_bias = torch.cat([position_bias[:, head : head + 1] for head in self.heads], 1)
        return super().forward(hidden_states, attention_mask, position_bias, *args, **kwargs)
