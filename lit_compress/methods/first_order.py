"""First-order pruning on the cubic schedule ("UP_first" in LPAF's figures): LPAF's step 1 as a method.

    S_ij = sum_t |g_ij(t) W_ij(t)|     or - sum_t g_ij(t) W_ij(t)       (Ren & Zhu 2023, Eq. 4)

    Sanh et al. 2020, "Movement Pruning", https://arxiv.org/abs/2005.07683, without a learned mask: gradients are those
    of the sparse net, and a zeroed weight's score is frozen.

Equations, schedule and deviations: pruning_stage.py. Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.pruning_stage import FirstOrderRanking, UnstructuredPruning
from lit_compress.methods.stage import Stage, Training


class FirstOrder(Method):
    """Prune single weights by what the loss would change without them, to first order.

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
        prune: FirstOrderRanking = FirstOrderRanking(),
        distillation: Distillation = Distillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), UnstructuredPruning(self.prune, self.density)]
