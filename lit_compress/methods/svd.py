"""Truncated SVD and retraining, the baseline LPAF and FWSVD measure against ("SVD_ft").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

The fine-tuned net is factorized and retrained on the task loss, with the dense net's logits
(LPAF's tables: "a unified logits distillation objective").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_compress.decompose import decompose
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.low_rank_stage import LowRankRetraining
from lit_compress.methods.stage import Stage, Training
from lit_compress.surgery import Factors


@dataclass(frozen=True)
class Factorized(Training):
    """How the factorized net is retrained.

    Args:
        sigma_side: the factor that gets the singular values: ``out`` = left (LPAF), ``in`` = right (FWSVD's
            baseline), ``balanced`` = their square roots on both. Same product, other training dynamics.
    """

    sigma_side: Literal["out", "in", "balanced"] = "out"


class Retraining(LowRankRetraining):
    """Factorize by truncated SVD, retrain everything."""

    def factors(self, previous: Path) -> Factors:
        """Return the truncated SVD of one matrix (Eqs. 1-2)."""
        side = self.training_settings.sigma_side
        return lambda name, weight, rank: decompose(weight, rank, sigma_side=side, name=name)


class SVD(Method):
    """Truncated SVD of a fine-tuned net, then retraining.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        rank: the same rank k for every matrix instead of a density.
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
        teacher: str | None = None,
        dense: Training = Training(),
        retrain: Factorized = Factorized(),
        distillation: Distillation = Distillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.rank, self.dense, self.retrain = rank, dense, retrain

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), retrain."""
        stages: list[Stage] = [] if self.teacher else [Stage("dense", self.dense, distil=False)]
        return [*stages, Retraining(self.retrain, self.density, self.rank)]
