"""Magnitude pruning on the cubic schedule ("UP_zero" in LPAF's figures).

    S_ij = |W_ij|     at the steps at which the weights are ranked      (Ren & Zhu 2023, section 2.2)

    Zhu & Gupta 2017, "To prune, or not to prune", https://arxiv.org/abs/1710.01878: gradual, cubic in the step.

The schedule, the ranking and the zeroing are those of pruning_stage.py. A zeroed weight is moved by the next step and
may return if that alone puts it above the threshold. Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.pruning_stage import Ranking, UnstructuredPruning
from lit_compress.methods.score import MagnitudeScore, Score
from lit_compress.methods.stage import Stage, Training


@dataclass(frozen=True)
class MagnitudeRanking(Ranking):
    """Which weights go, by their absolute values."""

    def make_score(self) -> Score:
        """Return the absolute values."""
        return MagnitudeScore()


class Magnitude(Method):
    """Prune single weights by their absolute values.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: kept fraction of the weights of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: training with pruning.
        distillation: how the teacher is listened to while pruning.
    """

    stores_zeros = True

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.25,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: MagnitudeRanking = MagnitudeRanking(),
        distillation: Distillation = Distillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), UnstructuredPruning(self.prune, self.density)]
