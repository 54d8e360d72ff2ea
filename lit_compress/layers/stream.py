"""Blocks whose norms stand before them, on a residual stream that changes its basis on the way (SP3, section 3.5).

In training the stream has its full width and every basis has gates; an export has the open directions only. The block
and the table of embeddings are self-contained on purpose: the export copies their source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class StreamNorm(nn.Module):
    """y = z * x;  z * y / sqrt(|y|^2 / features + eps), in place of the norm before a block.

    What it had of weight and bias is in the Linears that read it.

    Attributes:
        z: [features], values of the directions' gates in this forward, put there from outside; ones at first.
    """

    kind = "stream_norm"
    z: torch.Tensor

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        self.register_buffer("z", torch.ones(features))

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {"kind": self.kind, "features": self.features, "eps": self.eps}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        y = self.z * (x if x.dtype == torch.float64 else x.float())
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.z * y).to(x.dtype)


class Junction(nn.Module):
    """weight (z * x): from one basis of the stream to the next.

    Attributes:
        weight: [features, features], U'^T U at first.
        z: [features], values of the gates of the basis that ends; ones at first.
    """

    kind = "junction"
    z: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.empty(features, features))
        self.register_buffer("z", torch.ones(features))

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {"kind": self.kind, "features": self.features}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        return F.linear(self.z.to(x.dtype) * x, self.weight)


class StreamBlock(nn.Module):
    """An OPT or Llama block that puts what it read through ``middle`` and ``end``, where it has them.

    x' = middle(x) + attention(norm(x));  x'' = end(x') + network(norm(x')): their sides may have other widths.
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
        """Make ``block`` of the host model one of these, in place, with all it has."""
        block.__class__ = type(f"Stream{type(block).__name__}", (cls, type(block)), {})

    def spec(self) -> dict[str, Any]:
        """Return what :meth:`adopt` needs, as JSON."""
        return {"kind": self.kind}

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self

    def forward(self, hidden_states: torch.Tensor, **settings: Any) -> torch.Tensor:
        """Map [batch, length, width of the first basis] to [batch, length, width of the last]."""
        opt = hasattr(self, "fc1")
        norm = self.self_attn_layer_norm if opt else self.input_layernorm
        x = hidden_states
        y, _ = self.self_attn(hidden_states=norm(x), **settings)
        x = self._turned("middle", x) + self._dropped(y)
        if opt:
            y = self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(x))))
        else:
            y = self.mlp(self.post_attention_layernorm(x))
        return self._turned("end", x) + self._dropped(y)

    def _turned(self, name: str, x: torch.Tensor) -> torch.Tensor:
        turn = getattr(self, name, None)
        return x if turn is None else turn(x)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=getattr(self, "dropout", 0.0), training=self.training)


class StreamTable(nn.Embedding):
    """A table of embeddings of another width than the net's configuration says, which else does what it did."""

    kind = "stream_table"

    @classmethod
    def adopt(cls, table: nn.Embedding, width: int) -> None:
        """Make ``table`` of the host model one of these, in place; its values are lost."""
        table.__class__ = type(f"Stream{type(table).__name__}", (cls, type(table)), {})
        table.embedding_dim = width
        table.weight = nn.Parameter(torch.empty(table.num_embeddings, width))

    def spec(self) -> dict[str, Any]:
        """Return what :meth:`adopt` needs, as JSON."""
        return {"kind": self.kind, "width": self.embedding_dim}

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self
