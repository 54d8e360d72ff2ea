"""Norms and Linears for hidden states whose width differs from site to site: the export of SP3.

A hidden state of the dense model is x in R^d; here its width is the number of directions that its site has kept. Widths
differ, so the residual sum x + f(x) of a sub-layer f needs a matrix (W_R, Hu et al. 2024, Eqs. 15, 16). The model's own
code adds the output of a sub-layer to its input: so zeros are appended to a hidden state, as many as the next site is
wide; a sub-layer reads the front and writes into the back; the norm at the next site splits the two.

    [x, 0]  --read front-->  f  --write back-->  [x, 0] + [0, y] = [x, y]  --norm-->  norm(W_R x + y)

Where modules of their own add and normalise (BERT), they hand x and y to the norm one by one: no zeros are made, added
and cut off again (:meth:`NarrowNorm.link`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class NarrowNorm(nn.Module):
    """[x, y] -> [norm(weight x + bias + y), 0].

    Attributes:
        weight: W_R [features, in_features]; None where there is no x (the embeddings).
        bias: [features], or None likewise.
        bare: whether hidden states have no zeros; not stored, :meth:`link` finds it out.
    """

    kind = "narrow_norm"

    def __init__(self, in_features: int, features: int, room: int, eps: float, padded: int = 0) -> None:
        """Make the layer with empty parameters.

        Args:
            in_features: width of x; 0 for none.
            features: width of y and of the output.
            room: number of zeros appended to the output, the width of the next site.
            eps: added to the mean square over ``features``.
            padded: 0 for a root mean square; else a LayerNorm over y and zeros up to this width.
        """
        super().__init__()
        self.in_features, self.features, self.room, self.eps, self.padded = in_features, features, room, eps, padded
        self.bare = False
        self.weight = nn.Parameter(torch.empty(features, in_features)) if in_features else None
        self.bias = nn.Parameter(torch.empty(features)) if in_features else None

    def counted_weights(self) -> list[torch.Tensor]:
        """Return the weights that count beside the sites': the matrix W_R of the residual path."""
        return [] if self.weight is None else [self.weight]

    def link(self, net: nn.Module) -> None:
        """Do without zeros in the whole ``net`` if every sub-layer ends in dense, dropout and norm of one module."""
        norms = {name: norm for name, norm in net.named_modules() if isinstance(norm, NarrowNorm)}
        ends: list[Any] = [net.get_submodule(name.rpartition(".")[0]) for name, n in norms.items() if n.in_features]
        parts = {"dense", "dropout", "LayerNorm"}
        if self.bare or not ends or any({name for name, _ in end.named_children()} != parts for end in ends):
            return
        if not all(getattr(end.dense, "lead", 0) for end in ends):
            return
        for end in ends:
            end.__class__ = type(f"Narrow{type(end).__name__}", (type(end),), {"forward": NarrowNorm.end})
        for module in (*norms.values(), *(end.dense for end in ends)):
            module.bare = True

    @staticmethod
    def end(host: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Map what a sub-layer computed, and what it read, to the next hidden state; the forward of module ``host``."""
        return host.LayerNorm(host.dropout(host.dense(hidden_states)), input_tensor)

    def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """Map [..., in_features + features] to [..., features + room]; with ``before`` x is y alone, without room."""
        if self.weight is not None:
            if before is None:
                before, x = x[..., : self.in_features], x[..., self.in_features :]
            x = x + F.linear(before, self.weight, self.bias)
        if self.padded:
            mean = x.sum(-1, keepdim=True) / self.padded
            variance = x.square().sum(-1, keepdim=True) / self.padded - mean.square()
            x = (x - mean) * torch.rsqrt(variance + self.eps)
        else:
            x = F.rms_norm(x, (self.features,), None, self.eps)
        return F.pad(x, (0, self.room)) if self.room and not self.bare else x


class NarrowLinear(nn.Module):
    """A Linear that reads the front of its input and writes behind ``lead`` zeros.

    Heads may be narrower than the model's attention code expects: each is padded with zeros to ``head_width``, which
    changes neither scores nor contexts. If no head is left, attention gets one head of zeros.

    Attributes:
        weight: [out_features, in_features]; either may be 0.
        bias: [out_features] or None.
        table: outputs for DeBERTa's relative positions in exports of earlier versions, weight [positions,
            out_features], returned for an input [1, positions, 0]; None elsewhere.
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
        """Make the layer with empty parameters.

        Args:
            in_features, out_features, bias: as of a Linear; the inputs are the first of x.
            lead: number of zeros before the outputs.
            side: ``in`` if the inputs are those of heads, ``out`` if the outputs are; empty for neither.
            heads: number of heads.
            head_width: width of a head in the model's attention code.
            positions: rows of the table; 0 for none.
        """
        super().__init__()
        self.in_features, self.out_features, self.lead = in_features, out_features, lead
        self.side, self.heads, self.head_width, self.positions = side, heads, head_width, positions
        self.bare = False  # with the norms' link: y alone, without the zeros before it
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.table = nn.Embedding(positions, out_features, _freeze=True) if positions else None

    def counted_weights(self) -> list[torch.Tensor]:
        """Return the weights that count beside those of the sites: the table of positions."""
        return [] if self.table is None else [self.table.weight]

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
        return F.pad(y, (self.lead, 0)) if self.lead and not self.bare else y
