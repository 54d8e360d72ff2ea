"""Layers that adopt a module of the host model: attentions that lost heads, blocks and tables of other widths.

Heads: all layers of MPNet and T5 read one bias of relative positions. Widths: SP3, section 3.5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class SomeHeads(nn.Module):
    """MPNet's attention with some of the model's heads: it takes their columns of the shared bias.

    Attributes:
        heads: numbers of its heads in the dense model, rising.
    """

    kind = "some_heads"
    heads: list[int]

    @classmethod
    def adopt(cls, attention: Any, heads: list[int]) -> None:
        """Change the class of ``attention``, a module of the host model, in place; its matrices have these heads."""
        if not isinstance(attention, cls):
            attention.__class__ = type(f"Some{type(attention).__name__}", (cls, type(attention)), {})
        attention.heads = heads
        attention.count_heads()

    def count_heads(self: Any) -> None:
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

    def count_heads(self: Any) -> None:
        """Set the numbers that the model's own code has of its heads."""
        self.n_heads, self.inner_dim = len(self.heads), len(self.heads) * self.key_value_proj_dim

    def forward(  # type: ignore[override]
        self: Any,
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


class StreamBlock(nn.Module):
    """A block of OPT, Llama, Phi-3 or Qwen3 that puts what it read through ``middle`` and ``end``, where it has them.

    x' = middle(x) + attention(norm(x));  x'' = end(x') + network(norm(x')): x, x' and x'' may differ in width.
    """

    kind = "stream_block"

    @classmethod
    def adopt(cls, block: nn.Module) -> None:
        """Change the class of ``block``, a module of the host model, in place; its attributes stay."""
        block.__class__ = type(f"Stream{type(block).__name__}", (cls, type(block)), {})

    def counted_weights(self) -> list[torch.Tensor]:
        """Return the weights that count beside those of the sites: the matrices ``middle`` and ``end``."""
        return [turn.weight for turn in (getattr(self, "middle", None), getattr(self, "end", None)) if turn is not None]

    def forward(self: Any, hidden_states: torch.Tensor, **settings: Any) -> torch.Tensor:
        """Map [batch, length, width of the first basis] to [batch, length, width of the last]."""
        opt = hasattr(self, "fc1")
        norm = self.self_attn_layer_norm if opt else self.input_layernorm
        x = hidden_states
        y, _ = self.self_attn(hidden_states=norm(x), **settings)
        x = self._turned("middle", x) + self._dropped("resid_attn_dropout", y)
        if opt:
            y = self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))
        else:
            y = self.mlp(self.post_attention_layernorm(x))
        return self._turned("end", x) + self._dropped("resid_mlp_dropout", y)

    def _turned(self, name: str, x: torch.Tensor) -> torch.Tensor:
        turn = getattr(self, name, None)
        return x if turn is None else turn(x)

    def _dropped(self, own: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` after the dropout of the block: Phi-3 has modules, OPT a number, the others none."""
        layer = getattr(self, own, None)
        if layer is not None:
            return layer(x)
        return F.dropout(x, p=getattr(self, "dropout", 0.0), training=self.training)


class NarrowEmbedding(nn.Embedding):
    """A table of embeddings with another width than the model's configuration says and the forward of its own class."""

    kind = "stream_table"

    @classmethod
    def adopt(cls, table: nn.Embedding, width: int) -> None:
        """Change class and width of ``table``, a module of the host model, in place; its values are lost."""
        table.__class__ = type(f"Stream{type(table).__name__}", (cls, type(table)), {})
        table.embedding_dim = width
        table.weight = nn.Parameter(torch.empty(table.num_embeddings, width))
