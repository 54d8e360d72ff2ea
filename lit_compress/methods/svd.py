"""Truncated SVD and retraining, the baseline LPAF and FWSVD measure against ("SVD_ft").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

The fine-tuned net is factorized and retrained on the task loss, with the dense net's logits
(LPAF's tables: "a unified logits distillation objective").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.decompose import SigmaSide
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.low_rank_stage import LowRankRetraining, WeightedDecomposer
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.ranks import Allocation, RankRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Factorized(Training):
    """How the factorized net is retrained.

    Args:
        sigma_side: the factor that gets the singular values: ``out`` = left (LPAF), ``in`` = right (FWSVD's
            baseline), ``balanced`` = their square roots on both. Same product, other training dynamics.
    """

    sigma_side: SigmaSide = "out"


class Retraining(LowRankRetraining):
    """Factorize by truncated SVD, retrain everything."""

    def decomposer(self, method: Host, net: PreTrainedModel, previous: Path | None) -> WeightedDecomposer:
        """Return the truncated SVD (Eqs. 1-2)."""
        return WeightedDecomposer(sigma_side=self.training_settings.sigma_side)


class SVD(Method):
    """Truncated SVD of a fine-tuned net, then retraining.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        rank: the same rank k for every matrix instead of a density.
        rank_ratio: the same fraction of its ranks for every matrix instead of a density, floor(ratio * min(out, in)).
        allocation: ``uniform``; or ``global``, the same number of parameters in all, spent where the squared singular
            values per parameter are largest.
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        retrain: retraining of the factors.
        distillation: how the teacher's logits enter the retraining.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.25,
        rank: int | None = None,
        rank_ratio: float | None = None,
        allocation: Allocation = "uniform",
        teacher: str | None = None,
        dense: Training = Training(),
        retrain: Factorized = Factorized(),
        distillation: Distillation = Distillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.ranks = RankRule(density, rank, rank_ratio, allocation)
        self.dense, self.retrain = dense, retrain

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), retrain."""
        return [*self.first(self.dense), Retraining(self.retrain, self.ranks)]
