"""LoSparse: low-rank and sparse approximation.

Yixiao Li, Yifan Yu, Qingru Zhang, Chen Liang, Pengcheng He, Weizhu Chen, Tuo Zhao, "LoSparse: Structured Compression of
Large Language Models based on Low-Rank and Sparse Approximation", ICML 2023, https://arxiv.org/abs/2306.11222.
Notation: their W [in, out] is the transpose of torch's weight [out, in]; a column of theirs, a neuron, is a row here;
left [out, rank] = V^T, right [rank, in] = U^T, sparse = S^T.

    Eq. 5      W = U V + S
    Eqs. 6-8   W = P Sigma Q^T;  left, right = the first r of P sqrt(Sigma), sqrt(Sigma) Q^T;  S = W - left @ right
    Eqs. 2-4, 9, Algorithm 1   train all, prune rows of S on the cubic schedule        methods/row_pruning_stage.py

``density`` is the low-rank share plus the share of the kept rows, both of the matrices of the transformer blocks
(their "remaining ratio" r + p_T). ``prune.ratio`` says what becomes of ranks being whole numbers.

The two variants of section 4.4 give the sparse part up:
    Low-rank I    at once: only the factors are fine-tuned
    Low-rank II   S is pruned, on the same schedule, to nothing
Both have rank = density * out * in / (out + in), so that all end with the same size (the paper gives no ranks).

Deviations: as in row_pruning_stage.py. Logits distillation is there (``distillation.alpha``) and off, as in the paper's
main tables. The dense stage is the reference in the report, and the teacher if one is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_compress.errors import UserError
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.low_rank_stage import LowRankRetraining, WeightedDecomposer
from lit_compress.methods.row_pruning_stage import RowPruning, RowSparsePruning
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.ranks import RankRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LowRankPlusSparse(RowPruning):
    """How the sparse part is pruned, and how large the other part is.

    Args:
        low_rank: share of the matrices' parameters that the factors get; a smaller density leaves only factors.
        ratio: ``exact`` makes factors and kept rows together meet the density, ``nominal`` gives the rows
            density - low_rank as the authors do, although their ranks are rounded up (5.1 % for 5 % of BERT-base).
    """

    low_rank: float = 0.05
    ratio: Literal["exact", "nominal"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_rank <= 1:
            raise UserError(
                f"prune.low_rank: {self.low_rank} is not in (0, 1]; nearest valid {1.0 if self.low_rank > 1 else 0.01}"
            )


class LoSparse(Method):
    """Low-rank and sparse approximation: factors that stay, and a matrix whose rows are pruned by sensitivity.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: the decomposition and the pruning.
        distillation: how the dense net's logits enter the pruning; off by default.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.2,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: LowRankPlusSparse = LowRankPlusSparse(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        prune = RowSparsePruning(self.prune, self.density, self.prune.low_rank, self.prune.ratio)
        return [*self.first(self.dense), prune]


@dataclass(frozen=True)
class FromLowRank(Training):
    """How the factors are fine-tuned.

    Args:
        init: factorize the pre-trained backbone, as the paper does, or the fine-tuned net.
    """

    init: Literal["pretrained", "finetuned"] = "pretrained"


class FactorTuning(LowRankRetraining):
    """Drop S at once, train the factors."""

    def __init__(self, settings: FromLowRank, density: float) -> None:
        super().__init__(settings, RankRule(density))
        self.from_backbone = settings.init == "pretrained"

    def decomposer(self, method: Host, net: PreTrainedModel, previous: Path | None) -> WeightedDecomposer:
        """Return the balanced SVD (Eqs. 6-7)."""
        return WeightedDecomposer(sigma_side="balanced")


class LowRankI(Method):
    """LoSparse without its sparse part: fine-tune the factors of the backbone.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task; it takes the place of the dense stage.
        dense: fine-tuning of the backbone.
        retrain: fine-tuning of the factors.
        distillation: how the dense net's logits enter; off by default.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.2,
        teacher: str | None = None,
        dense: Training = Training(),
        retrain: FromLowRank = FromLowRank(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.retrain = dense, retrain

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), retrain."""
        return [*self.first(self.dense), FactorTuning(self.retrain, self.density)]


class LowRankII(Method):
    """LoSparse whose sparse part is pruned to nothing.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; of the factors alone.
        teacher: folder of a net already fine-tuned on the task; it takes the place of the dense stage.
        dense: fine-tuning of the backbone.
        prune: the pruning.
        distillation: how the dense net's logits enter; off by default.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.2,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: RowPruning = RowPruning(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), RowSparsePruning(self.prune, self.density, self.density)]
