"""LoSparse: low-rank and sparse approximation.

Yixiao Li, Yifan Yu, Qingru Zhang, Chen Liang, Pengcheng He, Weizhu Chen, Tuo Zhao, "LoSparse: Structured Compression of
Large Language Models based on Low-Rank and Sparse Approximation", ICML 2023, https://arxiv.org/abs/2306.11222.
Notation: their W [in, out] is the transpose of torch's weight [out, in]; a column of theirs, a neuron, is a row here;
left [out, rank] = V^T, right [rank, in] = U^T, sparse = S^T.

    Eq. 5      W = U V + S
    Eqs. 6-8   W = P Sigma Q^T;  left, right = the first r of P sqrt(Sigma), sqrt(Sigma) Q^T;  S = W - left @ right
    Eqs. 2-4, 9, Algorithm 1   train all, prune rows of S on the cubic schedule        stages/rows.py

``density`` is the low-rank share plus the share of the kept rows, both of the matrices of the transformer blocks
(their "remaining ratio" r + p_T). The authors give the rows density - low_rank, although ranks are rounded up (5.1 %
for 5 % of BERT-base). Here factors and rows together meet the density.

The two variants of section 4.4 give the sparse part up:
    Low-rank I    S is dropped at once: only the factors are fine-tuned
    Low-rank II   S is pruned on the same schedule until nothing is left
Both have rank = density * out * in / (out + in), so that all end with the same size (the paper gives no ranks).

Deviations: as in stages/rows.py. By default the factors have half of a density below 0.1, where 5 % would leave fewer
rows, or none. Distillation from logits (``distillation.alpha``) is possible and off, as in the
paper's main tables. The dense model is the reference in the report, and the teacher where distillation is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lit_compress.methods.base import Untaught
from lit_compress.stages.base import Limits, Stage, Training
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.rows import RowPruning, RowSparsePruning


@dataclass(frozen=True)
class LowRankPlusSparse(RowPruning):
    """How the sparse matrix is pruned, and how many parameters the factors have.

    Args:
        low_rank: share of the matrices' parameters that the factors get; None = 0.05, or half of a density below 0.1.
            With a share as large as the density no row is left.
    """

    low_rank: float | None = None
    limits: ClassVar[Limits] = {"prune.low_rank": {"above": 0, "high": 1}}


def usual_low_rank(density: float) -> float:
    """Return the share of the factors where none is given, at a density of factors and rows together.

    >>> usual_low_rank(0.2), usual_low_rank(0.04)
    (0.05, 0.02)
    """
    return min(0.05, density / 2)


class LoSparse(Untaught):
    """Approximate matrices by factors, which stay, plus a sparse matrix whose rows are pruned by sensitivity.

    Args:
        prune: the decomposition, the schedule of the pruning, and its training.
    """

    usual_density = 0.2
    prune: LowRankPlusSparse = LowRankPlusSparse()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        share = usual_low_rank(self.density) if self.prune.low_rank is None else self.prune.low_rank
        return [RowSparsePruning(self.prune, self.density, share, self.round_to or 1)]


@dataclass(frozen=True)
class FromLowRank(Training):
    """How the factors are fine-tuned.

    Args:
        init: ``pretrained`` factorizes the backbone, as the paper does; ``finetuned`` the dense model.
    """

    init: Literal["pretrained", "finetuned"] = "pretrained"


class LowRankI(Untaught):
    """LoSparse without its sparse part: fine-tune the factors of the backbone.

    Args:
        retrain: fine-tuning of the factors.
    """

    usual_density = 0.2
    rule: RankRule
    retrain: FromLowRank = FromLowRank()

    def __post_init__(self) -> None:
        self.rule = self.rank_rule()

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        factors = Factors(self.rule, side="balanced")  # Eqs. 6-7, without S
        return [CompressedStage("retrain", self.retrain, factors)]


class LowRankII(Untaught):
    """LoSparse whose sparse matrix is pruned until only the factors are left.

    Args:
        prune: schedule and score of the pruning, and its training.
    """

    usual_density = 0.2
    prune: RowPruning = RowPruning()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [RowSparsePruning(self.prune, self.density, self.density, self.round_to or 1)]
