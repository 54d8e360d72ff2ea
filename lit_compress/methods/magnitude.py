"""Magnitude pruning on the cubic schedule ("UP_zero" in LPAF's figures).

    S_ij = |W_ij|     at the steps at which the weights are ranked      (Ren & Zhu 2023, section 2.2)

    Zhu & Gupta 2017, "To prune, or not to prune", https://arxiv.org/abs/1710.01878: gradual, cubic in the step.

The schedule, the ranking and the zeroing are in stages/unstructured.py. A zeroed weight is moved by the next step and
may return if that alone puts it above the threshold. Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.methods.base import Method
from lit_compress.stages.base import Stage
from lit_compress.stages.scores import MagnitudeScore, Score
from lit_compress.stages.unstructured import Unstructured, UnstructuredPruning


@dataclass(frozen=True)
class MagnitudeSettings(Unstructured):
    """Schedule and ranking of magnitude pruning."""

    def make_score(self) -> Score:
        """Return the score |W|."""
        return MagnitudeScore()


class Magnitude(Method):
    """Prune single weights by their absolute values.

    Args:
        prune: schedule of the pruning, and its training.
    """

    stores_zeros = True
    prune: MagnitudeSettings = MagnitudeSettings()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [UnstructuredPruning(self.prune, self.density)]
