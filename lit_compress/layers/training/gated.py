"""Gates, and training layers whose gates are set from outside: CoFi's Linear and LayerNorm, FLOP's factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_compress.layers.deployed.low_rank import LowRankLinear
from lit_compress.layers.training.low_rank_sparse import as_linear
from lit_compress.numerics.hard_concrete import sample, soft


class HardConcrete(nn.Module):
    """Gates of ``groups`` x ``size`` units.

    Attributes:
        log_alpha: float32 [groups, size], learned; larger = keep.
        least: number of units that a group always keeps when gates are deterministic.
        copies: how many copies of a group's units, one after another, the gates multiply; each is sampled on its own.
    """

    def __init__(self, groups: int, size: int, mean: float, least: int = 0, seed: int = 0, copies: int = 1) -> None:
        """Sample log_alpha from N(mean, 0.01^2) with ``seed``, so that all ranks have the same values."""
        super().__init__()
        self.least, self.copies = least, copies
        noise = torch.randn(groups, size, generator=torch.Generator().manual_seed(seed))
        self.log_alpha = nn.Parameter(mean + 0.01 * noise)

    def sample(self) -> Tensor:
        """Return z [groups, copies * size] for one forward, differentiable; from the device's global generator."""
        log_alpha = self.log_alpha.repeat(1, self.copies)
        return sample(log_alpha, torch.rand_like(log_alpha))

    @torch.no_grad()
    def deterministic(self, mask: Tensor) -> Tensor:
        """Return deterministic z [groups, copies * size]: those in ``mask``, bool [groups, size], soft, others 0."""
        return (soft(self.log_alpha) * mask.to(self.log_alpha.device)).repeat(1, self.copies)


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
        self.register_parameter("weight", None)  # no weight; T5 reads the attribute before every use

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


class GatedRankLinear(LowRankLinear):
    """y = left diag(z) right x + bias = sum_k z_k left_k (right_k x) + bias.

    Attributes:
        z: values of the ranks' gates [rank], set from outside; a buffer, for checkpoints of validated models.
    """

    z: Tensor

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, rank, bias)
        self.register_buffer("z", torch.ones(rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]; gates multiply the right factor, usually smaller than its outputs."""
        return F.linear(F.linear(x, self.right * self.z[:, None]), self.left, self.bias)

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """Return the factors of the open ranks, with their gates in the right one; the matrix where it is smaller."""
        open_ = self.z > 0
        left, right = self.left[:, open_].contiguous(), self.right[open_] * self.z[open_, None]
        if left.numel() + right.numel() < self.in_features * self.out_features:
            return LowRankLinear.from_factors(self, left, right)
        return as_linear((left.double() @ right.double()).to(left.dtype), self.bias)
