"""LPAF: Low-Rank Prune-And-Factorize.

Siyu Ren, Kenny Q. Zhu, "Low-Rank Prune-And-Factorize for Language Model Compression", 2023,
https://arxiv.org/abs/2306.14152. Notation: W [n, m] is torch's weight [out, in], A = left, B = right.

    step 1   T_sparse = UP_first(T, D, v)                              Eqs. 4-5, stages/unstructured.py
    step 2   min_AB sum_ij S_ij (W_ij - (AB)_ij)^2, rank(AB) = k                                  Eq. 7
             rows share importance: s_i = sum_j S_ij;  I = diag(sqrt(s));  I W = U Sigma V^T           Eqs. 8-10
             A = I^-1 U_k Sigma_k,  B = V_k^T                                                     Eq. 11
    step 3   x_out = (1 - z) A B x + z W x,  z ~ Bernoulli(p) per matrix and forward              Eq. 12
             p = max(0, p_init - d t), zero after half of the steps                               Eq. 13
             two forwards with z1, z2:  L_c = D(y_z1, y_z2), KL or MSE                            Eq. 14

Deviations and choices where the paper is silent:
    - Eq. 11 is computed as A = W V_k, the same matrix without an inverse (rows of zero importance are safe).
    - Eqs. 8-10 print I = diag(s) although Eq. 7 asks for sqrt(s), which is taken.
    - s_i sums max(S_ij, 0) over kept weights; a negative sum would be read as its absolute value.
    - The score accumulates |g W|: the signed sum that Eq. 4 prints removes large weights near a minimum and collapsed
      in our runs (benchmarks/README.md).
    - W in Eq. 12 is frozen. L = mean of the two task losses + consistency * L_c, symmetric KL, also once p = 0
      (Table 7's row p_init = 0 beats plain fine-tuning).
    - Step 1 starts from the fine-tuned model (``prune.init``); the paper prunes the pre-trained one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_compress.layers import LowRankLinear
from lit_compress.layers.training.mixed_rank import MixedRankLinear
from lit_compress.methods.base import Method
from lit_compress.models.sites import Model
from lit_compress.models.surgery import Structure, factorize
from lit_compress.numerics.schedules import linear_to
from lit_compress.stages.base import Limits, Stage, Training
from lit_compress.stages.compression import CompressedStage, Items
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.unstructured import FirstOrderScore, Unstructured, UnstructuredPruning


@dataclass(frozen=True)
class MixedRank(Training):
    """How the sparse model is factorized and retrained.

    Args:
        weighting: the weight of a row's reconstruction error (step 2), a sum over the row: ``scores`` = positive scores
            of kept weights, ``none`` = plain SVD.
        p_init: first probability that a forward uses the sparse matrix; 0 turns mixing off. None: 0.1, 0.3 or 0.7 for
            density 0.5, 0.25 or 0.16; a rank counts as the density that it leaves.
        consistency: weight of L_c, the distance of two forwards' logits; 0 turns the second forward off.
    """

    weighting: Literal["scores", "none"] = "scores"
    p_init: float | None = None
    consistency: float = 1.0
    limits: ClassVar[Limits] = {"retrain.p_init": {"low": 0, "high": 1}, "retrain.consistency": {"low": 0}}


@dataclass(frozen=True)
class LPAFSettings(Unstructured):
    """How the dense model is pruned to the sparse one.

    Args:
        density: kept fraction v of the weights; None: 0.50, 0.25 or 0.10, the best in LPAF's Table 4 for
            model.density 0.50, 0.25 or 0.16.
    """

    density: float | None = None
    limits: ClassVar[Limits] = {"prune.density": {"above": 0, "high": 1}}


class LPAFPruning(UnstructuredPruning):
    """Step 1: prune single weights to the kept fraction v, which depends on the density after factorization."""

    settings: LPAFSettings
    rule: RankRule

    def __init__(self, settings: LPAFSettings, rule: RankRule) -> None:
        super().__init__(settings, 1.0, FirstOrderScore())
        self.rule = rule

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Choose v."""
        self.density = self.kept(net)
        return net

    @property
    def keeps_all(self) -> bool:
        """Whether no matrix is factorized, and so none is pruned."""
        return self.rule.keeps_all

    def kept(self, net: Model) -> float:
        """Return v; where it is not given, by the density that the ranks leave."""
        return self.settings.density or by_density(self.rule.density_of(net), 0.50, 0.25, 0.10)


class SparseFactors(Factors):
    """Factors of the sparse matrices by the sparsity-aware SVD (Eqs. 7-11), mixed with these."""

    def __init__(self, settings: MixedRank, rule: RankRule) -> None:
        super().__init__(rule, side="out")
        self.by_scores = settings.weighting == "scores"

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the factors by the scores of the model's folder."""
        if self.by_scores:
            assert self.folder is not None, "has the scores"
            rows = load_file(self.folder / "importance.safetensors")
            statistics = {name: rows[f"{name}/scores"] for name in names}
        return super().measure(net, names, statistics)

    def layer(self, net: Model) -> type[LowRankLinear]:
        """Return factors next to the sparse matrices; in shapes alone those in their places, as in the export."""
        return LowRankLinear if net.device.type == "meta" else MixedRankLinear

    def rebuilt(self, net: Model, structure: Structure, notes: dict[str, Any]) -> Model:
        """Put empty factors next to the sparse matrices."""
        return factorize(net, {name: spec["rank"] for name, spec in structure.items()}, None, MixedRankLinear)


class MixedRankRetraining(CompressedStage):
    """Steps 2 and 3: factorize the sparse model, retrain the factors with the sparse matrices mixed in."""

    settings: MixedRank
    shrinks_first = repeatable = False  # the layer has the matrix, too, and coins decide

    def __init__(self, settings: MixedRank, rule: RankRule) -> None:
        super().__init__("retrain", settings, SparseFactors(settings, rule))
        self.rule, self.forwards = rule, 2 if settings.consistency > 0 else 1

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Factorize the model and choose p_init."""
        net = super().begin(net, method, structure)
        self.p_init = self.first_p(net)
        return net

    def first_p(self, net: Model) -> float:
        """Return p_init; where it is not given, by the density that the ranks leave."""
        given = self.settings.p_init
        return by_density(self.rule.density_of(net), 0.1, 0.3, 0.7) if given is None else given

    def attach(self, net: Model) -> None:
        """Find the mixed-rank layers, for which a coin is thrown in every forward."""
        self._layers = [m for m in net.modules() if isinstance(m, MixedRankLinear)]
        # DeBERTa's queries and keys also project relative positions, inputs without a batch axis
        self._can_concat = not getattr(net.config, "share_att_key", False)

    def p(self, step: int) -> float:
        """Return the probability of the sparse matrix at ``step`` (Eq. 13)."""
        return linear_to(step, 0, self.total_steps / 2, self.p_init, 0.0)

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Throw the coins, do one or two forwards, return the loss terms with the consistency (Eqs. 12-14)."""
        p = self.p(method.trainer.global_step)
        if p == 0:
            for layer in self._layers:
                layer.release()
        coins = self._throw(p, method.step_seed, self.forwards)  # two also once p is 0: then of two dropout masks
        if self.forwards == 1:
            self._set(coins)
            return super().losses(method, batch)
        logits = self._two_forwards(method, batch, coins)
        return method.objective(logits, batch, distil=self.distil, copies=2, consistency=self.settings.consistency)

    def _throw(self, p: float, seed: int, forwards: int) -> Tensor:
        """Return the coins [forwards, matrices]; the same on every rank, whatever the device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(forwards, len(self._layers), generator=generator) < p

    def _set(self, coins: Tensor) -> None:
        for layer, z in zip(self._layers, coins.T.tolist(), strict=True):
            layer.z = tuple(z)

    def _concats(self, device: torch.device) -> bool:
        """Return whether both forwards are one of twice the batch: fewer operator calls, but slower on a CPU."""
        return self._can_concat and device.type != "cpu"

    def _two_forwards(self, method: MicroBatches, batch: dict[str, Tensor], coins: Tensor) -> Tensor:
        """Return the logits [2b, ..., classes] of both forwards."""
        parts, concats = list[Tensor](), self._concats(batch["input_ids"].device)
        if concats:
            batch = {name: value.repeat(2, 1) for name, value in batch.items() if value.ndim == 2}
        for some in coins.split(2 if concats else 1):
            self._set(some)
            parts.append(method.logits(batch))
        return torch.cat(parts)

    def status(self, net: Model, step: int) -> dict[str, float]:
        """Also log p."""
        return {**super().status(net, step), "p": self.p(step)}


class LPAF(Method):
    """Low-rank prune-and-factorize: prune by first-order scores, factorize, retrain with mixed ranks.

    Args:
        rank: the same rank k for every matrix.
        prune: step 1.
        retrain: steps 2 and 3.
    """

    rule: RankRule
    rank: int | None = None
    prune: LPAFSettings = LPAFSettings()
    retrain: MixedRank = MixedRank()

    def __post_init__(self) -> None:
        self.rule = self.rank_rule()

    def own_stages(self) -> list[Stage]:
        """Return prune, retrain."""
        return [LPAFPruning(self.prune, self.rule), MixedRankRetraining(self.retrain, self.rule)]


def by_density(density: float, half: float, quarter: float, less: float) -> float:
    """Return the value that LPAF found best at the nearest of the densities 0.50, 0.25 and 0.16 (Tables 4 and 7)."""
    return half if density > 0.375 else quarter if density > 0.205 else less
