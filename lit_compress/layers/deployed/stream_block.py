"""A block of OPT, Llama, Phi-3 or Qwen3, and a table of embeddings on a stream of other widths (SP3, section 3.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class StreamBlock(nn.Module):
    """A block of OPT, Llama, Phi-3 or Qwen3 that puts what it read through ``middle`` and ``end``, where it has them.

    x' = middle(x) + attention(norm(x));  x'' = end(x') + network(norm(x')): x, x' and x'' may differ in width.
    """

    kind = "stream_block"
    self_attn: Any
    self_attn_layer_norm: Any
    final_layer_norm: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    fc1: Any
    fc2: Any
    activation_fn: Any
    mlp: Any

    @classmethod
    def adopt(cls, block: nn.Module) -> None:
        """Change the class of ``block``, a module of the host model, in place; its attributes stay."""
        block.__class__ = type(f"Stream{type(block).__name__}", (cls, type(block)), {})

    def counted_weights(self) -> list[torch.Tensor]:
        """Return the weights that count beside those of the sites: the matrices ``middle`` and ``end``."""
        return [turn.weight for turn in (getattr(self, "middle", None), getattr(self, "end", None)) if turn is not None]

    def forward(self, hidden_states: torch.Tensor, **settings: Any) -> torch.Tensor:
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
