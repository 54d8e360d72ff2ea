"""Truncated SVD and retraining, the baseline LPAF and FWSVD measure against ("SVD_ft").

    W [out, in] = U Sigma V^T;  left = U_k Sigma_k [out, k],  right = V_k^T [k, in]     (LPAF Eqs. 1-2)

The fine-tuned net is factorized and retrained on the task loss, with the dense net's logits
(LPAF's tables: "a unified logits distillation objective").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from lit_compress.budget import allocate_ranks, stored_density
from lit_compress.decompose import decompose
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.stage import Stage, Training
from lit_compress.surgery import factorize, load_net

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Factorized(Training):
    """How the factorized net is retrained.

    Args:
        sigma_side: the factor that gets the singular values: ``out`` = left (LPAF), ``in`` = right (FWSVD's
            baseline), ``balanced`` = their square roots on both. Same product, other training dynamics.
    """

    sigma_side: Literal["out", "in", "balanced"] = "out"


class Retraining(Stage):
    """Factorize by truncated SVD, retrain everything.

    Args:
        settings: how.
        density: of the sites, after factorization.
        rank: the same rank for every matrix instead.
    """

    def __init__(self, settings: Factorized, density: float, rank: int | None) -> None:
        super().__init__("retrain", settings)
        self.settings, self.density, self.rank = settings, density, rank

    def build(self, method: Method, previous: Path | None, restoring: bool) -> PreTrainedModel:
        """Factorize the dense net."""
        assert previous is not None
        net = load_net(previous)

        def factors(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
            return decompose(weight, rank, sigma_side=self.settings.sigma_side, name=name)

        factorize(net, allocate_ranks(net, self.density, self.rank), None if restoring else factors)
        self.achieved = stored_density(net)
        return net

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show the density, which no longer changes."""
        return {"density": self.achieved, "target": self.density}


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

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank that makes no matrix smaller."""
        super().check(net)
        allocate_ranks(net, self.density, self.rank)

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), retrain."""
        stages: list[Stage] = [] if self.teacher else [Stage("dense", self.dense, distil=False)]
        return [*stages, Retraining(self.retrain, self.density, self.rank)]
