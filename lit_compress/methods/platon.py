"""PLATON: pruning by an upper confidence bound of the weights' importance.

Qingru Zhang et al., "PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance",
ICML 2022, https://arxiv.org/abs/2206.12562. Element-wise, with w after an optimizer step and the gradient of that step:

    sensitivity    I = |w g|, averaged over a window of ``interval`` steps
    smoothed       Ibar = beta1 Ibar + (1 - beta1) I
    uncertainty    U = |I - Ibar|, with the new Ibar;    Ubar = beta2 Ubar + (1 - beta2) U
    score          S = Ibar Ubar
    schedule       kept fraction cubic from 1 to the density; global top-v; the others are set to zero

As in the authors' program, gradients are clipped (the configs clip to norm 1) and w is read before it is zeroed: a
zeroed weight that the step moved has a score and may return.

Deviations: AdamW instead of Adamax. A window enters the averages when it is complete. In the authors' program that is
one step later, at the first step of the next window. The averages are the same. Weights are zeroed after every step of
the ramp, not only when they are ranked. Biases are never pruned; the authors' are, by a filter of names. Zeros are
stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_compress.methods.base import Untaught
from lit_compress.numerics.importance import accumulate_sensitivity_, fold_sensitivity_
from lit_compress.stages.base import Limits, Stage
from lit_compress.stages.unstructured import Score, Unstructured, UnstructuredPruning
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import local

KINDS = ("mean", "average", "uncertainty")  # of a score's buffers


class UpperConfidenceScore(Score):
    """Smoothed sensitivity times smoothed uncertainty (PLATON).

    Args:
        beta1: weight of the old value in the moving average of the sensitivity.
        beta2: weight of the old value in the uncertainty's average.
        window: optimizer steps whose sensitivity is averaged before it enters the moving average.
    """

    steps: Tensor

    def __init__(self, beta1: float, beta2: float, window: int) -> None:
        super().__init__()
        self.beta1, self.beta2, self.window = beta1, beta2, window
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make the buffers: three float32 numbers per weight."""
        self._count = len(weights)
        for kind in KINDS:
            for i, weight in enumerate(weights):
                zeros = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
                self.register_buffer(f"{kind}_{i}", zeros)

    def _all(self, kind: str) -> list[Tensor]:
        return [self.get_buffer(f"{kind}_{i}") for i in range(self._count)]

    def check(self, start: int) -> None:
        """Refuse a first ranking before the first window is complete: until then every score is 0."""
        if start < self.window:
            raise UserError(
                f"prune.start: {start} steps are fewer than the {self.window} of prune.interval, "
                f"after which the first scores are known; valid: at least {self.window} steps"
            )

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int) -> None:
        """Add the step's sensitivity to the window; when the window is complete, update the scores."""
        mean, average, uncertainty = (self._all(kind) for kind in KINDS)
        if any(weight.grad is not None for weight in weights):  # else the step is left out
            accumulate_sensitivity_(mean, self.steps, weights, [weight.grad for weight in weights])
        if step % self.window == 0:
            folded = fold_sensitivity_(average, uncertainty, mean, self.steps, self.beta1, self.beta2)
            for score, value in zip(scores, folded, strict=True):
                local(score).copy_(value)


@dataclass(frozen=True)
class ConfidenceSettings(Unstructured):
    """Schedule and ranking of PLATON; ``interval`` is also the number of steps over which sensitivity is averaged.

    Args:
        beta1: weight of the old value in the moving average of the sensitivity, in [0, 1).
        beta2: weight of the old value in the uncertainty's average, in [0, 1).
    """

    beta1: float = 0.85
    beta2: float = 0.95
    limits: ClassVar[Limits] = {f"prune.{name}": {"low": 0, "below": 1} for name in ("beta1", "beta2")}


class PLATON(Untaught):
    """Prune single weights by an upper confidence bound of their sensitivity.

    Args:
        prune: schedule and score of the pruning, and its training.
    """

    stores_zeros = True
    usual_density = 0.2
    prune: ConfidenceSettings = ConfidenceSettings()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        score = UpperConfidenceScore(self.prune.beta1, self.prune.beta2, self.prune.interval)
        return [UnstructuredPruning(self.prune, self.density, score)]
