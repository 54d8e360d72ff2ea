"""PLATON: pruning by an upper confidence bound of the weights' importance.

Qingru Zhang et al., "PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance",
ICML 2022, https://arxiv.org/abs/2206.12562. Element-wise, with w after an optimizer step and the gradient of that step:

    sensitivity    I = |w g|, averaged over a window of ``interval`` steps
    smoothed       Ibar = beta1 Ibar + (1 - beta1) I
    uncertainty    U = |I - Ibar|, with the new Ibar;    Ubar = beta2 Ubar + (1 - beta2) U
    score          S = Ibar Ubar;    beta2 = 1: S = Ibar
    schedule       kept fraction cubic from 1 to the density; global top-v; the others are set to zero

As in the authors' program, gradients are clipped (the configs clip to norm 1) and w is read before it is zeroed: a
zeroed weight that the step moved has a score and may return.

Deviations: AdamW instead of Adamax. A window enters the averages when it is complete, one step earlier than in the
authors' program, which does so at the first step of the next window; the averages are the same. Weights are zeroed
after every step of the ramp, not only when they are ranked. Biases are never pruned; theirs are, by a filter of names.
Zeros are stored: density falls, bytes and FLOPs do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.errors import UserError
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.pruning_stage import Ranking, UnstructuredPruning
from lit_compress.methods.score import Score, UpperConfidenceScore
from lit_compress.methods.stage import Stage, Training


@dataclass(frozen=True)
class ConfidenceRanking(Ranking):
    """Which weights go, by sensitivity times uncertainty; ``interval`` is also the window of the sensitivity.

    Args:
        beta1: memory of the sensitivity, in [0, 1).
        beta2: memory of the uncertainty, in [0, 1]; 1 leaves the uncertainty out.
    """

    beta1: float = 0.85
    beta2: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta1 < 1:
            raise UserError(
                f"prune.beta1: {self.beta1} is not in [0, 1); nearest valid {0.0 if self.beta1 < 0 else 0.99}"
            )
        if not 0 <= self.beta2 <= 1:
            raise UserError(f"prune.beta2: {self.beta2} is not in [0, 1]; nearest valid {min(max(self.beta2, 0.0), 1)}")

    def make_score(self) -> Score:
        """Return the upper confidence bound."""
        return UpperConfidenceScore(self.beta1, self.beta2, self.interval)


class PLATON(Method):
    """Prune single weights by an upper confidence bound of their sensitivity.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: kept fraction of the weights of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: training with pruning.
        distillation: how the teacher is listened to while pruning; the paper has none.
    """

    stores_zeros = True

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.20,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: ConfidenceRanking = ConfidenceRanking(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), UnstructuredPruning(self.prune, self.density)]
