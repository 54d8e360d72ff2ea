"""SP3's training layers (Hu et al. 2024): LayerNorms and Linears with projections, and gates on their directions.

For pre-norm models (section 3.5) a gated norm, and a change of the residual stream's basis. In training the stream has
its full width and every basis has gates; an export has the open directions only. The block that uses them is in
layers/deployed/adopted.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F


class StreamNorm(nn.Module):
    """y = z * x;  z * y / sqrt(|y|^2 / features + eps), in place of the norm before a sub-layer.

    Weight and bias of the original norm have been multiplied into the Linears that read it.

    Attributes:
        z: [features], values of the directions' gates in this forward, set from outside; ones at first.
    """

    kind = "stream_norm"
    z: torch.Tensor

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.features, self.eps = features, eps
        self.register_buffer("z", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        y = self.z * (x if x.dtype == torch.float64 else x.float())
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.z * y).to(x.dtype)


class ProjectedNorm(StreamNorm):
    """y = z * (p_in x + shift);  p_out (z * norm(y)) + bias, in place of a LayerNorm (Eqs. 8, 9).

    norm(y) = y / sqrt(|y|^2 / features + eps): no mean is subtracted, and the divisor is the original width however
    many directions are closed. ``norm`` is in the structures of checkpoints, where version 0.2 had another one.

    Attributes:
        p_in: [features, features], U^T R at first (numerics/pca.py).
        shift: [features], zeros at first.
        p_out: [features, features], diag(gamma) U at first.
        bias: [features], the LayerNorm's beta.
    """

    kind = "projected_norm"

    def __init__(self, features: int, eps: float, norm: Literal["rms"] = "rms") -> None:
        super().__init__(features, eps)
        self.norm = norm
        self.p_in, self.p_out = (nn.Parameter(torch.empty(features, features)) for _ in range(2))
        self.shift, self.bias = (nn.Parameter(torch.zeros(features)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        return F.linear(super().forward(F.linear(x, self.p_in, self.shift)), self.p_out, self.bias)


class ProjectedLinear(nn.Module):
    """A Linear with a projection of its inputs or outputs, and gates on them (Eqs. 13, 14).

    Attributes:
        weight: [out_features, in_features], the original.
        bias: [out_features] or None.
        projection: [n, n], n the number of inputs or outputs, in which heads can mix when it is trained; or None.
        shift: bias of the projection [n], zeros at first; or None.
        z_in: values of the inputs' gates in this forward [in_features], set from outside; None for 1.
        z_out: values of the outputs' gates [out_features] or [1], likewise.
    """

    kind = "projected_linear"
    z_in: torch.Tensor | None
    z_out: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        side: Literal["in", "out"] | None = None,
        heads: int = 1,
        gates_in: int = 0,
        gates_out: int = 0,
        form: Literal["dense"] = "dense",
    ) -> None:
        """Make the layer with empty parameters.

        Args:
            in_features, out_features, bias: as of a Linear.
            side: whether inputs (``in``) or outputs (``out``), which belong to ``heads``, are projected; None: neither.
            heads: number of heads.
            gates_in, gates_out: numbers of gates on inputs and outputs; 0 for none.
            form: in the structures of checkpoints, where version 0.2 had another one.
        """
        super().__init__()
        self.in_features, self.out_features, self.side, self.heads = in_features, out_features, side, heads
        self.gates_in, self.gates_out, self.form = gates_in, gates_out, form
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        size = {"in": in_features, "out": out_features, None: 0}[side]
        self.projection = nn.Parameter(torch.empty(size, size)) if side else None
        self.shift = nn.Parameter(torch.zeros(size)) if side else None
        for name, count in (("z_in", gates_in), ("z_out", gates_out)):
            self.register_buffer(name, torch.ones(count) if count else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        if self.z_in is not None:
            x = x * self.z_in.to(x.dtype)
        if self.side == "in":
            x = F.linear(x, self.projection, self.shift)  # type: ignore[arg-type]
        y = F.linear(x, self.weight, self.bias)
        if self.side == "out":
            y = F.linear(y, self.projection, self.shift)  # type: ignore[arg-type]
        return y if self.z_out is None else y * self.z_out.to(y.dtype)


class BasisChange(nn.Module):
    """weight (z * x): changes the basis of the residual stream.

    Attributes:
        weight: [features, features], U'^T U at first.
        z: [features], values of the gates on the directions of the former basis; ones at first.
    """

    kind = "junction"
    z: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.weight = nn.Parameter(torch.empty(features, features))
        self.register_buffer("z", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., features] to [..., features]."""
        return F.linear(self.z.to(x.dtype) * x, self.weight)
