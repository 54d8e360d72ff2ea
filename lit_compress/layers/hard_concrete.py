"""A grid of hard-concrete gates: the parameter behind them, and what they are in this forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_compress.gates import keep_best, kept_units, probability, sample, soft


class HardConcrete(nn.Module):
    """Gates of ``groups`` x ``size`` units.

    Attributes:
        log_alpha: float32 [groups, size], learned; larger = keep.
        least: units a group keeps in any case, when nothing is drawn.
        copies: how often the units of a group stand behind each other in what it gates, each drawn on its own.
    """

    def __init__(self, groups: int, size: int, mean: float, least: int = 0, seed: int = 0, copies: int = 1) -> None:
        """Start from N(mean, 0.01^2), drawn from ``seed``, so that every rank has the same."""
        super().__init__()
        self.least, self.copies = least, copies
        noise = torch.randn(groups, size, generator=torch.Generator().manual_seed(seed))
        self.log_alpha = nn.Parameter(mean + 0.01 * noise)

    def draw(self) -> Tensor:
        """Return z [groups, copies * size] for one forward, differentiable; from the device's global generator."""
        log_alpha = self.log_alpha.repeat(1, self.copies)
        return sample(log_alpha, torch.rand_like(log_alpha))

    def probability(self) -> Tensor:
        """Return P(z > 0), [groups, size]."""
        return probability(self.log_alpha)

    @torch.no_grad()
    def settle(self, mask: Tensor | None = None) -> Tensor:
        """Return z [groups, copies * size] when nothing is drawn: the kept units have their soft value, the others 0.

        Args:
            mask: bool [groups, size], what is kept; None for as many as are expected, the best.
        """
        if mask is None:
            mask = keep_best(self.log_alpha, kept_units(self.log_alpha, self.least))
        return (soft(self.log_alpha) * mask.to(self.log_alpha.device)).repeat(1, self.copies)

    @torch.no_grad()
    def clamp_(self, low: float, high: float) -> None:
        """Keep log_alpha in [low, high]; called after an optimizer step."""
        self.log_alpha.clamp_(low, high)
