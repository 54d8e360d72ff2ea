"""FLOP: factorized low-rank pruning, with a learned gate on every rank.

Ziheng Wang, Jeremy Wohlwend, Tao Lei, "Structured Pruning of Large Language Models", EMNLP 2020,
https://arxiv.org/abs/1910.04732; open points follow https://github.com/asappresearch/flop. Notation: their P
and Q are left [out, r] and right [r, in] here.

    factors     W = P G Q = sum_k z_k p_k q_k^T,   G = diag(z)                  layers/training/gated.py
    gates       z hard-concrete, one for every rank of every matrix             numerics/hard_concrete.py
    size        s = sum over matrices of (out + in) sum_k P(z_k > 0)            numerics/hard_concrete.py
    objective   max over lambda, min over z and weights of L + lambda1 (s - t) + lambda2 (s - t)^2     stages/gated.py
    target      t falls linearly in the first m steps, then it stays

In evaluation a matrix keeps as many ranks as its gates expect to be open, those with the largest. Gates, multipliers,
target and budget are the same as in CoFi, which took them from here. The result has ordinary low-rank layers.

Deviations and choices where the paper is silent:
    - It trains its language models with factors from the beginning, so that P Q has as many parameters as W. A
      pre-trained W is decomposed with all of its ranks: P = U sqrt(Sigma), Q = sqrt(Sigma) V^T. The model is the same
      before the first step, and s begins at up to twice the dense size; so does t.
    - Gates begin open (``prune.log_alpha`` 2.5), since a pre-trained model is lost where they begin at 0, as in their
      program. The temperature is 2/3, as for CoFi; theirs is 1.
    - s is a share of the matrices' weights; their sparsities turn the sign of lambda1. Biases are not counted.
    - At the end the ranks kept are those that fit the budget, and each matrix keeps one. A
      matrix whose factors would be larger than itself is stored whole, and counted so.
    - Embeddings and the output layer keep their size; the paper prunes both in its language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_compress.layers.training.gated import GatedRankLinear
from lit_compress.methods.base import Untaught
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.sites import Model, site_shapes
from lit_compress.models.surgery import Structure, factorize
from lit_compress.numerics.hard_concrete import Size
from lit_compress.numerics.masks import keep_count
from lit_compress.numerics.ranks import Shape, stored
from lit_compress.numerics.search import largest
from lit_compress.stages.base import Limits, Stage
from lit_compress.stages.gated import GatedStage, GatedTraining
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.rank_rule import RankRule, below_one_rank
from lit_compress.stages.rows import balanced
from lit_compress.utils.sharding import is_first


@dataclass(frozen=True)
class FLOPPruning(GatedTraining):
    """How the gates of the ranks are trained.

    Args:
        log_alpha: of all gates at first; 2.5 opens 98 % of them.
        init: ``pretrained`` factorizes the backbone, which learns the task while it is pruned; ``finetuned`` the dense
            model.
    """

    log_alpha: float = 2.5
    init: Literal["pretrained", "finetuned"] = "pretrained"
    # beyond, neither loss nor size has a gradient
    limits: ClassVar[Limits] = {"prune.log_alpha": {"low": -12, "high": 12, "hint": "usual: 2.5"}}


def grouped(shapes: dict[str, Shape]) -> dict[str, list[str]]:
    """Return name of a gate -> its sites, sites of one full rank: a gate has groups of one size."""
    gates: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        gates.setdefault(f"ranks_{min(shape)}", []).append(name)
    return gates


def gated_size(shapes: dict[str, Shape], whole: int) -> Size:
    """Return the size of the factors of matrices (out, in) as a function of their open ranks, of ``whole`` dense
    weights.
    """
    gates = grouped(shapes)
    places = {name: (gate, group) for gate, names in gates.items() for group, name in enumerate(names)}
    parts = [(sum(shapes[name]), place) for name, place in places.items()]
    return Size(parts, {gate: (len(names), min(shapes[names[0]])) for gate, names in gates.items()}, whole)


class RankPruning(GatedStage):
    """The stage ``prune``: factorize all matrices, train factors and gates together, keep the open ranks."""

    settings: FLOPPruning

    def check(self, net: Model) -> None:
        """Refuse a density below one rank of every matrix."""
        least, whole = sum(sum(shape) for shape in site_shapes(net).values()), dense_site_params(net)
        if self.density * whole < least:
            raise below_one_rank(self.density, least / whole)

    def outline(self, net: Model) -> Model:
        """Return ``net`` with the same share of ranks in every matrix; which stay is decided by training."""
        with torch.device("meta"):
            rule = RankRule(self.density, fill=True, round_to=self.round_to)
            return factorize(net, rule.allocate(net), None)

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Decompose all matrices and put gates on all of their ranks.

        configure_model sends the values of the first process.
        """
        self.shapes = site_shapes(net)
        factors = balanced if structure is None and is_first() else None
        factorize(net, {name: min(shape) for name, shape in self.shapes.items()}, factors, GatedRankLinear)
        size = gated_size(self.shapes, dense_site_params(net))
        self.sites = grouped(self.shapes)
        self.finest = min(self.sites, key=lambda gate: min(sum(self.shapes[name]) for name in self.sites[gate]))
        self.rounds = frozenset(self.sites)
        self.make_gates(size, self.settings.log_alpha, self.sites)
        return net

    def set_gates(self, net: Model, z: dict[str, Tensor], deterministic: bool = False) -> None:
        """Give every matrix the values of its ranks' gates."""
        for gate, names in self.sites.items():
            for name, values in zip(names, z[gate], strict=True):
                net.get_submodule(name).z = values

    def fit(self, log_alphas: dict[str, Tensor], budget: int | None = None) -> dict[str, Tensor]:
        """Return the ranks to keep; budget that whole matrices do not use goes to the others."""
        goal, kept = keep_count(self.density, self.size.total), super().fit
        return kept(log_alphas, largest(lambda size: self.stored(kept(log_alphas, size)) <= goal, 0, 2 * goal))

    def stored(self, masks: dict[str, Tensor]) -> int:
        """Return the number of weights that the file has with these ranks."""
        return sum(
            stored(*self.shapes[name], int(ranks.sum()))
            for gate, names in self.sites.items()
            for name, ranks in zip(names, masks[gate], strict=True)
        )


class FLOP(Untaught):
    """Factorize all matrices and prune ranks by learned gates; the export has ordinary low-rank layers.

    Args:
        prune: training of factors and gates.
    """

    prune: FLOPPruning = FLOPPruning(epochs=20, target_warmup=0.5)

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [RankPruning(self.prune, self.density, self.round_to)]
