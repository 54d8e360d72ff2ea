"""LPAF: Low-Rank Prune-And-Factorize.

Siyu Ren, Kenny Q. Zhu, "Low-Rank Prune-And-Factorize for Language Model Compression", 2023,
https://arxiv.org/abs/2306.14152. Notation: W [n, m] is torch's weight [out, in], A = left, B = right.

    step 1   T_sparse = UP_first(T, D, v)                              Eqs. 4-5, methods/pruning_stage.py
    step 2   min_AB sum_ij S_ij (W_ij - (AB)_ij)^2, rank(AB) = k                                  Eq. 7
             rows share importance: s_i = sum_j S_ij;  I = diag(s);  I W = U Sigma V^T           Eqs. 8-10
             A = I^-1 U_k Sigma_k,  B = V_k^T                                                     Eq. 11
    step 3   x_out = (1 - z) A B x + z W x,  z ~ Bernoulli(p) per matrix and forward              Eq. 12
             p = max(0, p_init - d t), zero after half of the steps                               Eq. 13
             two forwards with z1, z2:  L_c = D(y_z1, y_z2), KL or MSE                            Eq. 14

Deviations and choices where the paper is silent:
    - Eq. 11 is computed as A = W V_k, the same matrix without an inverse (rows of zero importance are safe).
    - Eqs. 8-10 weight by s although Eq. 7 asks for sqrt(s): ``power`` 0.5 solves Eq. 7, 1.0 is the printed form.
    - s_i sums max(S_ij, 0) over kept weights; a negative sum would be read as its absolute value.
    - The score accumulates |g W| (``prune.score: absolute``): the signed sum of Eq. 4 removes large weights
      near a minimum and collapsed in our runs (benchmarks/README.md). ``signed`` is there.
    - W in Eq. 12 is frozen. L = mean of the two task losses + consistency * L_c, symmetric KL, also once p = 0
      (Table 7's row p_init = 0 beats plain fine-tuning).
    - Step 1 starts from the fine-tuned net (``prune.init``); the paper prunes the pre-trained one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.importance import Weighting, load_row_importance
from lit_compress.kinds import kind_of
from lit_compress.layers import MixedRankLinear
from lit_compress.losses import consistency_loss
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.low_rank_stage import LowRankRetraining, WeightedDecomposer
from lit_compress.methods.pruning_stage import Pruning, UnstructuredPruning
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.ranks import RankRule
from lit_compress.schedules import linear_decay_to_zero

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MixedRank(Training):
    """How the factorized net is retrained.

    Args:
        weighting: what a row's reconstruction error is weighted by (step 2): ``scores`` = positive scores of
            kept weights, ``scores_all`` = positive scores, ``scores_abs`` = their absolute values,
            ``scores_raw`` = the plain sum, ``mask`` = kept weights, ``none`` = plain SVD.
        power: exponent on the row importance; 0.5 solves Eq. 7, 1.0 is the literal Eq. 9.
        p_init: first probability of the sparse matrix; 0 turns mixing off. None: 0.1, 0.3 or 0.7 for density 0.5,
            0.25 or 0.16.
        consistency: weight of L_c; 0 turns the second forward off.
        consistency_after_decay: keep L_c (two dropout masks) once p has reached 0.
        double_forward: ``sequential`` puts the batch through the net twice, ``concat`` makes one batch of twice the
            size. Same loss and gradients; on CPUs ``concat`` is slower (benchmarks/README.md). Half the batch size
            with ``trainer.accumulate_grad_batches`` doubled needs the memory of dense fine-tuning, in the same time.
    """

    weighting: Weighting = "scores"
    power: float = 0.5
    p_init: float | None = None
    consistency: float = 1.0
    consistency_after_decay: bool = True
    double_forward: Literal["sequential", "concat"] = "sequential"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_init is not None and not 0 <= self.p_init <= 1:
            raise UserError(
                f"retrain.p_init: {self.p_init} is not in [0, 1]; nearest valid {min(max(self.p_init, 0), 1)}"
            )
        if self.power <= 0:
            raise UserError(f"retrain.power: {self.power} is not above 0; 0.5 solves Eq. 7, 1.0 is the printed form")
        if self.consistency < 0:
            raise UserError(f"retrain.consistency: {self.consistency} is below 0, the smallest valid value")


class MixedRankRetraining(LowRankRetraining):
    """Steps 2 and 3: factorize the sparse net, retrain the factors with the sparse matrices mixed in.

    Args:
        settings: how.
        density: of the sites, after factorization.
        rank: the same rank for every matrix instead.
    """

    layer = MixedRankLinear

    def __init__(self, settings: MixedRank, density: float, rank: int | None) -> None:
        super().__init__(settings, RankRule(density, rank))
        self.settings = settings
        self.p_init = settings.p_init if settings.p_init is not None else by_density(density, 0.1, 0.3, 0.7)

    def check(self, net: PreTrainedModel) -> None:
        """Also refuse ``concat`` where a matrix sees something without a batch axis (DeBERTa's relative positions)."""
        super().check(net)
        if self.settings.double_forward == "concat" and getattr(net.config, "share_att_key", False):
            raise UserError(
                f"retrain.double_forward: concat does not work with {net.config.model_type}, whose query and key also "
                "project relative positions; use sequential"
            )

    def decomposer(self, method: Host, net: PreTrainedModel, previous: Path | None) -> WeightedDecomposer:
        """Return the sparsity-aware SVD (Eqs. 7-11)."""
        assert previous is not None
        rows = load_row_importance(previous, self.settings.weighting)
        return WeightedDecomposer(rows, axis="out", power=self.settings.power)

    def attach(self, net: PreTrainedModel) -> None:
        """Find the layers whose coin is thrown."""
        self._layers = [m for m in net.modules() if isinstance(m, MixedRankLinear)]

    def p(self, step: int) -> float:
        """Return the probability of the sparse matrix at ``step`` (Eq. 13)."""
        return linear_decay_to_zero(step, self.total_steps, self.p_init)

    def losses(self, method: Host, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Throw the coins, put the batch through once or twice, compare (Eqs. 12-14)."""
        p = self.p(method.trainer.global_step)
        if p == 0:
            for layer in self._layers:
                layer.release()
        twice = self.settings.consistency > 0 and (p > 0 or self.settings.consistency_after_decay)
        coins = self._throw(p, method.micro_seed, 2 if twice else 1)
        if not twice:
            self._set(coins)
            return super().losses(method, batch)
        logits = self._two_forwards(method, batch, coins)
        first, second = logits.chunk(2)
        terms = method.objective(logits, batch, distil=self.distil, copies=2)
        kind = kind_of(method.task_record)
        consistency = consistency_loss(first, second, kind.loss, kind.counted(batch))
        return {**terms, "consistency": self.settings.consistency * consistency}

    def _throw(self, p: float, seed: int, forwards: int) -> Tensor:
        """Return the coins [forwards, matrices]; the same on every rank, whatever the device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(forwards, len(self._layers), generator=generator) < p

    def _set(self, coins: Tensor) -> None:
        for layer, z in zip(self._layers, coins.T.tolist(), strict=True):
            layer.z = tuple(z)

    def _two_forwards(self, method: Host, batch: dict[str, Tensor], coins: Tensor) -> Tensor:
        """Return the logits [2b, ..., classes] of both forwards."""
        if self.settings.double_forward == "concat":
            self._set(coins)
            twice = {name: value.repeat(2, 1) for name, value in batch.items() if value.ndim == 2}
            return method.logits(twice)

        def forward(i: int) -> Tensor:
            self._set(coins[i : i + 1])
            return method.logits(batch)

        return torch.cat([forward(0), forward(1)])

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show p too."""
        return {**super().status(net, step), "p": self.p(step)}


class LPAF(Method):
    """Low-rank prune-and-factorize: prune by first-order scores, factorize, retrain with mixed ranks.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        rank: the same rank k for every matrix instead of a density.
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone, the teacher of what follows.
        prune: step 1.
        retrain: steps 2 and 3.
        distillation: how the teacher's logits enter steps 1 and 3.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.25,
        rank: int | None = None,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: Pruning = Pruning(),
        retrain: MixedRank = MixedRank(),
        distillation: Distillation = Distillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.rank, self.dense, self.prune, self.retrain = rank, dense, prune, retrain

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune, retrain."""
        v = self.prune.density if self.prune.density is not None else by_density(self.density, 0.50, 0.25, 0.10)
        v = 1.0 if self.density == 1 else v
        return [
            *self.first(self.dense),
            UnstructuredPruning(self.prune, v),
            MixedRankRetraining(self.retrain, self.density, self.rank),
        ]


def by_density(density: float, half: float, quarter: float, less: float) -> float:
    """Choose among the values LPAF found best at densities 0.50, 0.25 and 0.16 (Tables 4 and 7).

    A density between them gets the value of the nearest.
    """
    return half if density > 0.375 else quarter if density > 0.205 else less
