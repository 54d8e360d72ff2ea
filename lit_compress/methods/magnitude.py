"""Magnitude pruning on the cubic schedule ("UP_zero" in LPAF's figures).

    S_ij = |W_ij|     at the steps at which the weights are ranked      (Ren & Zhu 2023, section 2.2)

    Zhu & Gupta 2017, "To prune, or not to prune", https://arxiv.org/abs/1710.01878: gradual, cubic in the step.

The schedule, the ranking and the zeroing are in stages/unstructured.py. A zeroed weight is moved by the next step and
may return if that alone puts it above the threshold. Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lit_compress.methods.base import Method
from lit_compress.stages.base import Stage
from lit_compress.stages.unstructured import Score, Unstructured, UnstructuredPruning
from lit_compress.utils.sharding import local


class MagnitudeScore(Score):
    """The score |W| at the time of the ranking (UP_zero, LPAF section 2.2)."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Copy |W| into the scores."""
        for score, weight in zip(scores, weights, strict=True):
            local(score).copy_(local(weight).detach().float().abs())


class Magnitude(Method):
    """Prune single weights by their absolute values.

    Args:
        prune: schedule of the pruning, and its training.
    """

    stores_zeros = True
    prune: Unstructured = Unstructured()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [UnstructuredPruning(self.prune, self.density, MagnitudeScore())]
