"""Truncated SVD and retraining, the baseline of LPAF and FWSVD ("SVD_ft").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

The fine-tuned model is factorized and retrained on the task loss and distillation from the dense model's logits
(LPAF's tables: "a unified logits distillation objective").
"""

from __future__ import annotations

from lit_compress.methods.base import Ranked
from lit_compress.stages.base import Stage
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.lora import Retraining
from lit_compress.stages.low_rank import Factors


class SVD(Ranked):
    """Factorize a fine-tuned model by truncated SVD, then retrain it."""

    retrain: Retraining = Retraining()

    def __post_init__(self) -> None:
        self.rule = self.rank_rule(self.allocation)

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        factors = Factors(self.rule, sigma_side="out")  # Eqs. 1-2
        return [CompressedStage("retrain", self.retrain, factors)]
