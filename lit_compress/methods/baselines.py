"""The baselines in LPAF's tables and figures (Ren & Zhu 2023): SVD, also FWSVD's, and two prunings of single weights.

SVD ("SVD_ft"): the fine-tuned model is factorized, and retrained on the task loss and distillation from the dense
model's logits ("a unified logits distillation objective").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

Magnitude ("UP_zero"): gradual, cubic in the step (Zhu & Gupta 2017, "To prune, or not to prune",
https://arxiv.org/abs/1710.01878).

    S_ij = |W_ij|     at the steps at which the weights are ranked      (LPAF, section 2.2)

FirstOrder ("UP_first"): LPAF's step 1 as a method of its own. Like movement pruning (Sanh et al. 2020,
https://arxiv.org/abs/2005.07683), without a learned mask: gradients come from the sparse model, and a zeroed weight's
score is frozen.

    S_ij = sum_t |g_ij(t) W_ij(t)|       (LPAF Eq. 4)

Schedule, ranking, zeroing and deviations of both: stages/unstructured.py. A weight zeroed by its magnitude is moved by
the next step and may return if that alone puts it above the threshold. Zeros are stored: density falls, bytes and FLOPs
do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lit_compress.methods.base import Method, Ranked
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.unstructured import FirstOrderScore, Score, Unstructured, UnstructuredPruning
from lit_compress.utils.sharding import local


class SVD(Ranked):
    """Factorize a fine-tuned model by truncated SVD, then retrain it."""

    retrain: Training = Training()

    def __post_init__(self) -> None:
        self.rule = self.rank_rule(self.allocation)

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        factors = Factors(self.rule, side="out")  # Eqs. 1-2
        return [CompressedStage("retrain", self.retrain, factors)]


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


class FirstOrder(Method):
    """Prune single weights by the first-order estimate of the change of the loss without them.

    Args:
        prune: schedule of the pruning, and its training.
    """

    stores_zeros = True
    prune: Unstructured = Unstructured()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [UnstructuredPruning(self.prune, self.density, FirstOrderScore())]
