"""What unstructured pruning ranks weights by: a score, with what it must remember as buffers of its own.

The scores themselves, float32 and shaped and sharded like the weights, belong to the stage; a score object writes
them. Its hooks are called in the order of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.importance import (
    FirstOrderForm,
    accumulate_first_order_,
    accumulate_sensitivity_,
    fold_sensitivity_,
    magnitude,
)
from lit_compress.tensors import local

Reduce = Callable[[Tensor], object] | None


class Score(nn.Module):
    """Larger = keep. The base writes nothing."""

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make the buffers that mirror ``weights``."""

    def check(self, start: int) -> None:
        """Refuse to be ranked after ``start`` optimizer steps for the first time.

        Raises:
            UserError: the scores are not known by then.
        """

    def before_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], reduce: Reduce) -> None:
        """See the weights of the forward and whole gradients, not clipped."""

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int, reduce: Reduce) -> None:
        """See the weights after optimizer step number ``step``, nothing zeroed yet, and clipped gradients."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Bring the scores up to date; nothing is zeroed yet in this step."""


class FirstOrderScore(Score):
    """|g W| or -g W, summed over the optimizer steps (UP_first, LPAF Eq. 4).

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
    """|W| when the weights are ranked (UP_zero, LPAF section 2.2)."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Read the weights."""
        for score, weight in zip(scores, weights, strict=True):
            local(score).copy_(magnitude(local(weight)))


class UpperConfidenceScore(Score):
    """Smoothed sensitivity times smoothed uncertainty (PLATON).

    Args:
        beta1: memory of the sensitivity.
        beta2: memory of the uncertainty; 1 leaves it out.
        window: optimizer steps whose sensitivity is averaged before it enters the memory.
    """

    steps: Tensor

    def __init__(self, beta1: float, beta2: float, window: int) -> None:
        super().__init__()
        self.beta1, self.beta2, self.window = beta1, beta2, window
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self._kinds = ("mean", "average") if beta2 == 1 else ("mean", "average", "uncertainty")

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make two or three float32 numbers per weight."""
        self._count = len(weights)
        for kind in self._kinds:
            for i, weight in enumerate(weights):
                zeros = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
                self.register_buffer(f"{kind}_{i}", zeros)

    def _all(self, kind: str) -> list[Tensor]:
        return [self.get_buffer(f"{kind}_{i}") for i in range(self._count)] if kind in self._kinds else []

    def check(self, start: int) -> None:
        """Want a whole window before the first ranking; before, every score is 0."""
        if start < self.window:
            raise UserError(
                f"prune.start: {start} steps are fewer than the {self.window} of prune.interval, "
                f"after which the first scores are known; valid: at least {self.window} steps"
            )

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int, reduce: Reduce) -> None:
        """Take the step into the window; when the window is complete, into the scores."""
        mean, average, uncertainty = (self._all(kind) for kind in ("mean", "average", "uncertainty"))
        accumulate_sensitivity_(mean, self.steps, weights, [weight.grad for weight in weights], reduce)
        if step % self.window == 0:
            folded = fold_sensitivity_(average, uncertainty, mean, self.steps, self.beta1, self.beta2)
            for score, value in zip(scores, folded, strict=True):
                local(score).copy_(value)
