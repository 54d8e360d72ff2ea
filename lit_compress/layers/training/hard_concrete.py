"""A grid of hard-concrete gates: its parameter, and its values, sampled or deterministic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_compress.numerics.hard_concrete import keep_best, kept_units, probability, sample, soft


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

    def probability(self) -> Tensor:
        """Return P(z > 0), [groups, size]."""
        return probability(self.log_alpha)

    @torch.no_grad()
    def deterministic(self, mask: Tensor | None = None) -> Tensor:
        """Return deterministic z [groups, copies * size]: kept units have their soft value, the others 0.

        Args:
            mask: bool [groups, size], the units to keep; None for the expected number of units with largest log_alpha.
        """
        if mask is None:
            mask = keep_best(self.log_alpha, kept_units(self.log_alpha, self.least))
        return (soft(self.log_alpha) * mask.to(self.log_alpha.device)).repeat(1, self.copies)

    @torch.no_grad()
    def clamp_(self, low: float, high: float) -> None:
        """Clamp log_alpha to [low, high], in place; called after an optimizer step."""
        self.log_alpha.clamp_(low, high)
