"""An attention that has lost heads, where all layers read one bias of relative positions: MPNet, T5."""

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
        attention.heads = heads
        attention.count_heads()

    def count_heads(self) -> None:
        """Set the numbers that the model's own code has of its heads."""
        self.num_attention_heads, self.all_head_size = len(self.heads), len(self.heads) * self.attention_head_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Map [batch, length, width] to a tuple with the same; the bias is [batch, dense heads, length, length]."""
        return super().forward(hidden_states, attention_mask, self.own(position_bias), *args, **kwargs)

    def own(self, position_bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the columns of its heads, [batch, heads, length, length]."""
        if position_bias is None:
            return None
        # an index would be copied to the device in every forward, which a CUDA graph cannot record
        return torch.cat([position_bias[:, head : head + 1] for head in self.heads], 1)


class SomeT5Heads(SomeHeads):
    """T5's attention with some of the model's heads, or with none.

    The first block's attention makes the bias of its stack, and every attention hands it on with all columns.
    """

    kind = "some_t5_heads"
    key_value_proj_dim: int
    compute_bias: Any
    o: nn.Module

    def count_heads(self) -> None:
        """Set the numbers that the model's own code has of its heads."""
        self.n_heads, self.inner_dim = len(self.heads), len(self.heads) * self.key_value_proj_dim

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Map [batch, length, width] to the same, the bias [1, dense heads, length, keys] and the weights."""
        if position_bias is None and self.has_relative_attention_bias:
            length = hidden_states.shape[1]
            past = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
            keys = length + past if mask is None else mask.shape[-1]
            position_bias = self.compute_bias(length, keys, hidden_states.device, past)
        if not self.heads:
            return self.o(hidden_states), position_bias, None
        y, _, weights = super(SomeHeads, self).forward(
            hidden_states, mask, key_value_states, self.own(position_bias), past_key_values, **kwargs
        )
        return y, position_bias, weights
