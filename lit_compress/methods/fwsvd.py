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
    - A is computed without an inverse (numerics/decompose.py), so inputs without any information are safe.
    - Dropout is off in the Fisher pass; it goes over the training set once (``fisher_examples`` for fewer).
    - No distillation by default: the paper excludes it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lit_compress.methods.base import Distillation, Ranked
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.units import weighted
from lit_compress.stages.weighting import Weighted

PAPER_RANK_RATIO = 0.33


class FWSVD(Ranked):
    """Factorize a fine-tuned model by SVD weighted with Fisher information, then fine-tune the factors.

    Args:
        rank_ratio: the same fraction of its ranks for every matrix, floor(ratio * min(out, in)); the paper's 0.33 if
            neither it nor a rank nor a density is given.
    """

    usual_density = None  # the rank ratio decides
    dense = Training(warmup=0.0)
    retrain: Weighted = Weighted(warmup=0.0)
    matters: ClassVar[dict[str, Any]] = {"allocation": {"retrain.removes": ("components", None)}}
    distillation = Distillation(alpha=0.0)

    def __post_init__(self) -> None:
        self.rule = self.retrain.rule(self.rank_rule(self.allocation, rank_ratio=PAPER_RANK_RATIO))

    def own_stages(self) -> list[Stage]:
        """Return retrain."""
        return [CompressedStage("retrain", self.retrain, weighted(self.retrain, self.rule))]
