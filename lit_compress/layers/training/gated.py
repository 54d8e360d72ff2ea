"""CoFi's training layers: a Linear and a LayerNorm, multiplied by gates that are set from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GatedLinear(nn.Module):
    """y = z_out * layer(z_in * x), where z_out multiplies the bias too.

    For a Linear the gates multiply its weight instead of x and y, which are usually larger.

    Attributes:
        layer: a Linear or its training layer.
        z_in: gates of the inputs [in], None for 1.
        z_out: gates of the outputs [out] or one for all [1], None for 1.
    """

    z_in: Tensor | None = None
    z_out: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        if not isinstance(self.layer, nn.Linear):
            y = self.layer(x if self.z_in is None else x * self.z_in.to(x.dtype))
            return y if self.z_out is None else y * self.z_out.to(y.dtype)
        weight: Tensor = self.layer.weight
        bias: Tensor | None = self.layer.bias
        if self.z_in is not None:
            weight = weight * self.z_in
        if self.z_out is not None:
            weight, bias = weight * self.z_out[:, None], None if bias is None else bias * self.z_out
        return F.linear(x, weight, bias)


class GatedNorm(nn.Module):
    """A LayerNorm over the open dimensions, whose output is gated; skipped when its sub-layer is closed.

    With m = [z > 0], n = sum m and d dimensions:

        y = z * m * ((x - mu) / sqrt(var + eps) * weight + bias),  mu = sum m x / n,  var = sum m (x - mu)^2 / n

    which is the LayerNorm over the open dimensions alone (Xia et al. 2022). It is computed as a LayerNorm over all d of
    x with mu where dimensions are closed, times sqrt(n / d): their mean is mu, their variance var * n / d.

    Attributes:
        norm: the LayerNorm.
        z: gates of the dimensions [d], None for 1.
        z_layer: gate of the sub-layer before the norm [1]; where it is 0, y = x. None: there is none, or it is open.
        first: True to multiply x by z first, for the embeddings' norm, whose input has not been gated.
        share: n / d of deterministic gates, which makes eps exact; 1 in training, where eps is too large by d / n.
    """

    z: Tensor | None = None
    z_layer: Tensor | None = None
    share: float = 1.0

    def __init__(self, norm: nn.LayerNorm, first: bool = False) -> None:
        super().__init__()
        self.norm, self.first = norm, first

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., d]."""
        y = self.norm(x) if self.z is None else self._open(x, self.z)
        return y if self.z_layer is None else torch.where(self.z_layer > 0, y, x.to(y.dtype))

    def _open(self, x: Tensor, z: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.float() * z if self.first else x.float()
            open_ = (z > 0).float()
            number = open_.sum()
            mean = (x @ (open_ / number))[..., None]
            filled = torch.where(open_ > 0, x, mean)
            weight, bias = self.norm.weight * z * (number / len(z)).sqrt(), self.norm.bias * z
            return F.layer_norm(filled, (len(z),), weight, bias, self.norm.eps * self.share)

    def extra_repr(self) -> str:
        """Show ``first`` in ``print(net)``."""
        return f"first={self.first}"
