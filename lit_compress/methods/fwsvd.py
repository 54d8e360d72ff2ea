"""FWSVD: weighted low-rank factorization.

Yen-Chang Hsu, Ting Hua, Sungen Chang, Qian Lou, Yilin Shen, Hongxia Jin, "Language Model Compression with Weighted
Low-Rank Factorization", ICLR 2022, https://arxiv.org/abs/2207.00112. The paper writes Z = X W + b, so its W is torch's
weight transposed: its rows (inputs) are our columns, its A is our right^T, its B our left^T.

    I_w = 1/|D| sum_i (dL(d_i; w) / dw)^2                    empirical Fisher information, per example      Eq. 3
    min_AB sum_ij I_ij (W_ij - (AB)_ij)^2, rank(AB) = r                                                    Eq. 5
    rows share importance: I_i = sum_j I_ij, I = diag(sqrt(I_1), ..., sqrt(I_N));  min_AB |I W - I A B|    Eq. 6
    I W = U* S* V*^T;  A = I^-1 U*_r S*_r,  B = V*_r^T

Path 2 is fine-tune -> Fisher -> factorize at 33 % of the ranks -> fine-tune; path 3 starts from a compact model that
is fine-tuned already (``teacher``). The metric before the second fine-tuning is ``initial`` in ``stages.json`` and a
row of the final table.

Deviations and choices where the paper is silent:
    - A is computed without an inverse (decompose.py), so inputs without any information are safe.
    - Dropout is off in the Fisher pass; it goes over the training set once (``fisher_examples`` for fewer).
    - ``axis``: ``in`` is the paper's; ``out`` weights the other side (as LPAF does), ``both`` the product of both sums,
      ``element`` solves Eq. 5 itself by alternating least squares, which the paper leaves for future work.
    - No distillation by default: the paper excludes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lit_compress.decompose import Axis
from lit_compress.errors import UserError
from lit_compress.families import find_sites
from lit_compress.fisher import Estimator, Fisher, estimate_fisher
from lit_compress.importance import load_row_importance
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.low_rank_stage import LowRankRetraining, WeightedDecomposer
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.progress import track
from lit_compress.ranks import Allocation, RankRule

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

    from lit_compress.tasks import Task

PAPER_RANK_RATIO = 0.33


@dataclass(frozen=True)
class Weighted(Training):
    """How the factorization is weighted, and how the factorized net is fine-tuned.

    Args:
        weighting: ``fisher``; ``none`` = plain SVD; ``importance`` = the scores a pruning stage left beside its net.
        axis: what shares an importance: ``in`` = an input's weights (the paper), ``out`` = an output's, ``both`` =
            product of the two, ``element`` = nothing, every weight has its own.
        power: exponent of the importance; 0.5 solves Eq. 6.
        estimator: ``per_example`` squares every example's gradient (Eq. 3), ``batch`` that of every batch.
        fisher_examples: training examples the Fisher information is estimated on; None = all.
    """

    weighting: Literal["none", "fisher", "importance"] = "fisher"
    axis: Axis = "in"
    power: float = 0.5
    estimator: Estimator = "per_example"
    fisher_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power <= 0:
            raise UserError(f"retrain.power: {self.power} is not above 0; 0.5 solves Eq. 6, 1.0 squares the importance")
        if self.fisher_examples is not None and self.fisher_examples < 1:
            raise UserError(f"retrain.fisher_examples: {self.fisher_examples} is below 1, the smallest valid value")
        if self.weighting == "importance" and self.axis != "out":
            raise UserError(
                f"retrain.axis: '{self.axis}' has no scores; with weighting importance the only valid value is out"
            )


def fisher_of(
    net: PreTrainedModel, task: Task, batches: DataLoader, settings: Sequence[Weighted], shared: bool = False
) -> dict[str, Fisher]:
    """Return the Fisher information that ``settings`` ask for, by site, from one pass; empty if they do not.

    Args:
        net: fine-tuned on ``task``; on the device of the pass.
        task: gives the loss.
        batches: training examples, each once.
        settings: one or several weightings with the same estimator.
        shared: every process of the default group has batches of its own.

    Raises:
        UserError: the gradients are not usable.
    """
    asked = [s for s in settings if s.weighting == "fisher"]
    if not asked:
        return {}
    return estimate_fisher(
        net,
        track(batches, "Fisher information", len(batches)),
        task.kind,
        [site.name for site in find_sites(net)],
        estimator=asked[0].estimator,
        elements=any(s.axis == "element" for s in asked),
        reduce=torch.distributed.all_reduce if shared else None,
    )


def weigh(settings: Weighted, fisher: dict[str, Fisher], folder: Path) -> WeightedDecomposer:
    """Return how matrices are taken apart under ``settings``.

    Args:
        settings: the weighting.
        fisher: by site, for ``fisher``.
        folder: of the net; a pruning stage left its scores there, for ``importance``.

    Raises:
        UserError: there are no scores.
    """
    if settings.weighting == "none":
        return WeightedDecomposer(sigma_side="in")
    if settings.weighting == "importance":
        return WeightedDecomposer(load_row_importance(folder, "scores"), "out", settings.power)
    importance = {name: found.importance(settings.axis) for name, found in fisher.items()}
    return WeightedDecomposer(importance, settings.axis, settings.power)


class WeightedRetraining(LowRankRetraining):
    """Estimate the Fisher information, factorize, fine-tune again."""

    training_settings: Weighted

    def check(self, net: PreTrainedModel) -> None:
        """Also refuse what would fail only after the dense stage."""
        super().check(net)
        settings = self.training_settings
        if settings.weighting == "importance":
            raise UserError(
                "retrain.weighting: importance needs a pruning stage's net, give it to factorize; nearest: fisher"
            )
        if self.ranks.allocation == "global" and settings.weighting == "fisher" and settings.axis == "element":
            raise UserError("retrain.axis: 'element' has no singular values for allocation global; nearest: both")

    def check_data(self, examples: int) -> None:
        """Refuse a Fisher pass over more examples than there are."""
        asked = self.training_settings.fisher_examples
        if asked is not None and asked > examples:
            raise UserError(f"retrain.fisher_examples: {asked} is more than there are; the largest is {examples}")

    def decomposer(self, method: Host, net: PreTrainedModel, previous: Path | None) -> WeightedDecomposer:
        """Return the Fisher-weighted SVD (Eqs. 3, 5 and 6)."""
        assert previous is not None
        settings, trainer = self.training_settings, method.trainer
        fisher: dict[str, Fisher] = {}
        if settings.weighting == "fisher":
            batches = trainer.datamodule.calibration_dataloader(settings.fisher_examples)
            net.to(trainer.strategy.root_device)
            fisher = fisher_of(net, method.task_record, batches, [settings], trainer.world_size > 1)
            net.to("cpu")
        return weigh(settings, fisher, previous)


class FWSVD(Method):
    """Fisher-weighted SVD of a fine-tuned net, then fine-tuning.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]. Of density, rank and
            rank_ratio give one; without any, rank_ratio is the paper's 0.33.
        rank: the same rank for every matrix.
        rank_ratio: the same fraction of its ranks for every matrix, floor(ratio * min(out, in)).
        allocation: ``uniform``; or ``global``, the same number of parameters in all, spent where the squared singular
            values of the weighted matrices per parameter are largest.
        teacher: folder of a net already fine-tuned on the task (path 3), e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        retrain: the weighting, and fine-tuning of the factors.
        distillation: how the dense net's logits enter the second fine-tuning; off in the paper.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float | None = None,
        rank: int | None = None,
        rank_ratio: float | None = None,
        allocation: Allocation = "uniform",
        teacher: str | None = None,
        dense: Training = Training(warmup=0.0),
        retrain: Weighted = Weighted(warmup=0.0),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, 1.0 if density is None else density, teacher, distillation)
        given = {"density": density, "rank": rank, "rank_ratio": rank_ratio}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            names = ", ".join(f"model.{name} {value}" for name, value in given.items())
            raise UserError(f"{names}: only one of them can decide the ranks; leave the others out")
        if not given:
            rank_ratio = PAPER_RANK_RATIO
        self.ranks = RankRule(self.density, rank, rank_ratio, allocation)
        self.dense, self.retrain = dense, retrain

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), retrain."""
        return [*self.first(self.dense), WeightedRetraining(self.retrain, self.ranks)]
