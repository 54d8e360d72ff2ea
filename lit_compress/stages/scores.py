"""The scores by which unstructured pruning ranks weights.

The score tensors, float32, shaped and sharded like the weights, belong to the stage; a score object writes them, and
keeps averages as buffers of its own. Its hooks are called in the order of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_compress.numerics.importance import (
    FirstOrderForm,
    accumulate_first_order_,
    accumulate_sensitivity_,
    fold_sensitivity_,
    magnitude,
)
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import local

Reduce = Callable[[Tensor], object] | None


class Score(nn.Module):
    """The base class of scores, which computes none. Weights with larger scores are kept."""

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make buffers shaped like ``weights``."""

    def check(self, start: int) -> None:
        """Refuse a first ranking after ``start`` optimizer steps that comes before the first scores.

        Raises:
            UserError: no scores are known after ``start`` steps.
        """

    def before_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], reduce: Reduce) -> None:
        """Read the weights before the step and their gradients: accumulated, reduced, not clipped."""

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int, reduce: Reduce) -> None:
        """Read the weights after optimizer step ``step``, before any is zeroed, and their clipped gradients."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Update the scores before weights are ranked; in this step no weight has been zeroed yet."""


class FirstOrderScore(Score):
    """The sum of |g W| or -g W over the optimizer steps (UP_first, LPAF Eq. 4).

    Args:
        form: ``absolute`` or ``signed``.
    """

    def __init__(self, form: FirstOrderForm) -> None:
        super().__init__()
        self.form = form

    def before_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], reduce: Reduce) -> None:
        """Add this step's term."""
        accumulate_first_order_(scores, weights, [weight.grad for weight in weights], self.form, reduce)


class MagnitudeScore(Score):
    """The score |W| at the time of the ranking (UP_zero, LPAF section 2.2)."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Copy |W| into the scores."""
        for score, weight in zip(scores, weights, strict=True):
            local(score).copy_(magnitude(local(weight)))


class UpperConfidenceScore(Score):
    """Smoothed sensitivity times smoothed uncertainty (PLATON).

    Args:
        beta1: weight of the old value in the moving average of the sensitivity.
        beta2: weight of the old value in the uncertainty's average; 1 leaves it out.
        window: optimizer steps whose sensitivity is averaged before it enters the moving average.
    """

    steps: Tensor

    def __init__(self, beta1: float, beta2: float, window: int) -> None:
        super().__init__()
        self.beta1, self.beta2, self.window = beta1, beta2, window
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self._kinds = ("mean", "average") if beta2 == 1 else ("mean", "average", "uncertainty")

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make the buffers: two float32 numbers per weight, or three with uncertainty."""
        self._count = len(weights)
        for kind in self._kinds:
            for i, weight in enumerate(weights):
                zeros = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
                self.register_buffer(f"{kind}_{i}", zeros)

    def _all(self, kind: str) -> list[Tensor]:
        return [self.get_buffer(f"{kind}_{i}") for i in range(self._count)] if kind in self._kinds else []

    def check(self, start: int) -> None:
        """Refuse a first ranking before the first window is complete: until then every score is 0."""
        if start < self.window:
            raise UserError(
                f"prune.start: {start} steps are fewer than the {self.window} of prune.interval, "
                f"after which the first scores are known; valid: at least {self.window} steps"
            )

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int, reduce: Reduce) -> None:
        """Add the step's sensitivity to the window; when the window is complete, update the scores."""
        mean, average, uncertainty = (self._all(kind) for kind in ("mean", "average", "uncertainty"))
        if any(weight.grad is not None for weight in weights):  # else the step is left out
            accumulate_sensitivity_(mean, self.steps, weights, [weight.grad for weight in weights], reduce)
        if step % self.window == 0:
            folded = fold_sensitivity_(average, uncertainty, mean, self.steps, self.beta1, self.beta2)
            for score, value in zip(scores, folded, strict=True):
                local(score).copy_(value)
