"""Truncated SVD and retraining, the baseline of LPAF and FWSVD ("SVD_ft").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

The fine-tuned model is factorized and retrained on the task loss and distillation from the dense model's logits
(LPAF's tables: "a unified logits distillation objective").
"""

from __future__ import annotations

from lit_compress.methods.base import Method
from lit_compress.stages.base import Stage
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.lora import Retraining
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.rank_rule import Allocation, RankRule


class SVD(Method):
    """Factorize a fine-tuned model by truncated SVD, then retrain it.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]. Give one of density,
            rank and rank_ratio; without any, the density is 0.25.
        rank: the same rank k for every matrix.
        rank_ratio: the same fraction of its ranks for every matrix, floor(ratio * min(out, in)).
        allocation: ``uniform``; or ``global``, the same number of parameters in all, spent where the squared singular
            values per parameter are largest.
        retrain: retraining of the factors.
    """

    rule: RankRule
    rank: int | None = None
    rank_ratio: float | None = None
    allocation: Allocation = "uniform"
    retrain: Retraining = Retraining()

    def __post_init__(self) -> None:
        self.rule = self.rank_rule(self.allocation)

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        factors = Factors(self.rule, "out")  # Eqs. 1-2
        return [CompressedStage("retrain", self.retrain, factors)]
