"""BertForSequenceClassification with compressed Linears, as config.structure lists them. Written by lit_compress."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification


class NarrowLinear(nn.Module):
    """A Linear that reads the front of its input and writes behind ``lead`` zeros.

    Heads may be narrower than the attention around it takes them: they are read and written with zeros behind them, up
    to ``head_width``, which changes neither scores nor contexts. Without a head left, attention is given one of zeros.

    Attributes:
        weight: [out_features, in_features]; either may be 0.
        bias: [out_features] or None.
        table: what comes out for DeBERTa's relative positions, weight [positions, out_features]; None for others. They
            are asked for with an input [1, positions, 0].
    """

    kind = "narrow"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        lead: int = 0,
        side: str = "",
        heads: int = 0,
        head_width: int = 0,
        positions: int = 0,
    ) -> None:
        """Make an empty one.

        Args:
            in_features: read, from the front.
            out_features: written.
            bias: whether there is one.
            lead: zeros before what is written.
            side: ``in`` or ``out``: the inputs or outputs are ``heads``.
            heads: how many.
            head_width: of a head in the attention around.
            positions: rows of the table.
        """
        super().__init__()
        self.in_features, self.out_features, self.lead = in_features, out_features, lead
        self.side, self.heads, self.head_width = side, heads, head_width
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.table = nn.Embedding(positions, out_features, _freeze=True) if positions else None

    def add_positions(self, table: torch.Tensor) -> None:
        """Take the table [positions, out_features]."""
        self.table = nn.Embedding.from_pretrained(table)

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {
            "kind": self.kind, "in_features": self.in_features, "out_features": self.out_features,
            "bias": self.bias is not None, "lead": self.lead, "side": self.side, "heads": self.heads,
            "head_width": self.head_width, "positions": 0 if self.table is None else self.table.num_embeddings,
        }  # fmt: skip

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., at least in_features] to [..., lead + out_features], heads padded."""
        if self.side == "in" and self.heads:
            x = x.unflatten(-1, (self.heads, self.head_width))[..., : self.in_features // self.heads].flatten(-2)
        if self.table is not None and x.shape[-1] == 0:
            y = self.table.weight[None]
        elif self.in_features:
            y = F.linear(x[..., : self.in_features], self.weight, self.bias)
        else:
            y = x.new_zeros(*x.shape[:-1], self.out_features)
            y = y if self.bias is None else y + self.bias
        if self.side == "out":
            if not self.heads:
                return x.new_zeros(*x.shape[:-1], self.head_width)
            width = self.out_features // self.heads
            y = F.pad(y.unflatten(-1, (self.heads, width)), (0, self.head_width - width)).flatten(-2)
        return F.pad(y, (self.lead, 0)) if self.lead else y


class NarrowNorm(nn.Module):
    """[x, y] -> [norm(weight x + bias + y), 0].

    Attributes:
        weight: W_R [features, in_features]; in_features is 0 where nothing was read before (the embeddings).
        bias: [features].
    """

    kind = "narrow_norm"

    def __init__(self, in_features: int, features: int, room: int, eps: float, padded: int = 0) -> None:
        """Make an empty one.

        Args:
            in_features: width of x.
            features: width of y, and of what comes out.
            room: zeros behind it, the width of the next site.
            eps: added to the mean square, over ``features``.
            padded: 0 for the root mean square; else a LayerNorm over y and zeros up to this width.
        """
        super().__init__()
        self.in_features, self.features, self.room, self.eps, self.padded = in_features, features, room, eps, padded
        self.weight = nn.Parameter(torch.empty(features, in_features)) if in_features else None
        self.bias = nn.Parameter(torch.empty(features)) if in_features else None

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {
            "kind": self.kind, "in_features": self.in_features, "features": self.features, "room": self.room,
            "eps": self.eps, "padded": self.padded,
        }  # fmt: skip

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features + features] to [..., features + room]."""
        if self.weight is not None:
            x = x[..., self.in_features :] + F.linear(x[..., : self.in_features], self.weight, self.bias)
        if self.padded:
            mean = x.sum(-1, keepdim=True) / self.padded
            variance = x.square().sum(-1, keepdim=True) / self.padded - mean.square()
            x = (x - mean) * torch.rsqrt(variance + self.eps)
        else:
            x = F.rms_norm(x, (self.features,), None, self.eps)
        return F.pad(x, (0, self.room)) if self.room else x


class SizedEmbedding(nn.Module):
    """A table whose vectors are shorter than the net's configuration says.

    Attributes:
        weight: [num_embeddings, width].
    """

    kind = "sized_embedding"

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, width
        self.weight = nn.Parameter(torch.empty(num_embeddings, width))

    def spec(self) -> dict[str, Any]:
        """Return what an empty one is built from, as JSON."""
        return {"kind": self.kind, "num_embeddings": self.num_embeddings, "width": self.embedding_dim}

    def fuse(self) -> nn.Module:
        """Return the cheapest equal module: itself."""
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [...] to [..., width]."""
        return F.embedding(ids, self.weight)



LAYERS = {layer.kind: layer for layer in [NarrowLinear, NarrowNorm, SizedEmbedding]}


class CompressedBertForSequenceClassification(BertForSequenceClassification):
    """BertForSequenceClassification with another layer at the sites of config.structure."""

    def __init__(self, config):
        super().__init__(config)
        for name, spec in config.structure.items():
            parent, _, child = name.rpartition(".")
            sizes = {key: value for key, value in spec.items() if key != "kind"}
            if spec["kind"] == "attributes":
                for key, value in sizes.items():
                    setattr(self.get_submodule(name), key, value)
            elif hasattr(layer := LAYERS[spec["kind"]], "adopt"):
                layer.adopt(self.get_submodule(name), **sizes)
            else:
                setattr(self.get_submodule(parent), child, layer(**sizes))
