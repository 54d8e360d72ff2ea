"""The stage that factorizes a net and retrains it, for all low-rank methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lit_compress.layers import LowRankLinear
from lit_compress.models.surgery import Structure, factorize, multiply_out, rebuild
from lit_compress.numerics.decompose import Axis, Importance, SigmaSide, WeightedSVD, decompose, weighted_svd
from lit_compress.stages.base import Stage, StageContext, Training
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import from_first, is_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DecomposedMatrix(Protocol):
    """The approximations of all ranks of one matrix."""

    @property
    def sigma(self) -> Tensor:
        """Singular values, falling, float64."""

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in]."""

    def without(self, first: int, last: int) -> Tensor:
        """Return the weight [out, in] less its components first, ..., last - 1."""


class Decomposer(Protocol):
    """Factorizes the matrices of one net under a weighting; sites are called by their names."""

    @property
    def nested(self) -> bool:
        """Whether a smaller rank keeps a part of a larger one's components, so that :meth:`svd` has all ranks."""

    def factors(self, name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in]."""

    def svd(self, name: str, weight: Tensor, components: int | None = None) -> DecomposedMatrix:
        """Return the decomposition with all ranks, or as many as ``components``."""

    def sigma(self, name: str, weight: Tensor) -> Tensor:
        """Return the singular values of the weighted matrix, falling, float64."""

    def bias_change(self, name: str, weight: Tensor, approx: Tensor) -> Tensor | None:
        """Return what the bias [out] gets when ``approx`` replaces ``weight``; None for nothing."""


@dataclass(frozen=True)
class WeightedDecomposer:
    """Factorizes matrices by plain or weighted SVD.

    Attributes:
        importance: by site, in the shape that ``axis`` needs (numerics/decompose.py); None for the plain SVD.
        axis: which weights share one importance.
        power: exponent of the importance.
        sigma_side: which factor gets the singular values, for the plain SVD.
    """

    importance: dict[str, Importance] | None = None
    axis: Axis = "out"
    power: float = 0.5
    sigma_side: SigmaSide | None = None

    @property
    def nested(self) -> bool:
        """Whether there is one SVD for all ranks: not for element-wise weights."""
        return self.axis != "element"

    def bias_change(self, name: str, weight: Tensor, approx: Tensor) -> Tensor | None:
        """Return None: biases stay."""
        return None

    def factors(self, name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the matrix of site ``name``."""
        return decompose(weight, rank, self._of(name), self.axis, self.power, self.sigma_side, name)

    def svd(self, name: str, weight: Tensor, components: int | None = None) -> WeightedSVD:
        """Return the weighted SVD of the matrix of site ``name`` with all its ranks, or as many as ``components``.

        Raises:
            UserError: the weighting is element-wise, for which there is no SVD.
        """
        if not self.nested:
            raise UserError("axis: 'element' has no singular values, every rank is solved by itself; nearest: both")
        return weighted_svd(weight, self._of(name), self.axis, self.power, self.sigma_side, name, components)

    def sigma(self, name: str, weight: Tensor) -> Tensor:
        """Return the singular values of the weighted matrix, falling, float64."""
        return self.svd(name, weight).sigma

    def _of(self, name: str) -> Importance | None:
        return None if self.importance is None else self.importance[name]


class LowRankRetraining(Stage):
    """The stage ``retrain``: factorize the matrices of the net of the stage before, then train all parameters.

    Factors that this net has already are multiplied out before.

    Args:
        settings: settings of the training.
        ranks: rule for the rank of each matrix.
        distil: True to add the distillation terms to the loss.
        name: of the stage.
    """

    layer: type[LowRankLinear] = LowRankLinear  # the layer that replaces a Linear
    shrinks_first = repeatable = True

    def __init__(self, settings: Training, ranks: RankRule, distil: bool = True, name: str = "retrain") -> None:
        super().__init__(name, settings, distil)
        self.ranks = ranks

    @property
    def round_to(self) -> int:  # type: ignore[override]
        """Number of which the ranks are multiples."""
        return self.ranks.round_to

    @property
    def decided_by_data(self) -> bool:  # type: ignore[override]
        """Whether singular values decide on the ranks."""
        return self.ranks.allocation == "global" and not self.ranks.keeps_all

    def decomposer(self, method: StageContext, net: PreTrainedModel, previous: Path | None) -> Decomposer:
        """Return the decomposer for ``net``, which was loaded from the folder ``previous`` (None: the backbone)."""
        raise NotImplementedError

    def narrow(self, method: StageContext, net: PreTrainedModel) -> RankRule:
        """Remove whole units of ``net`` before its matrices are factorized; return the rule for what is left."""
        return self.ranks

    def factorized(self, decomposer: Decomposer, ranks: dict[str, int]) -> None:
        """Take note of the factorization; called on rank 0 after it, before training."""

    def refine(self, method: StageContext, net: PreTrainedModel, previous: Path | None) -> None:
        """Improve the factors of ``net``, made from that in the folder ``previous``; called on every rank."""

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank that makes no matrix smaller."""
        self.ranks.check(net)

    def outline(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return ``net`` with factors."""
        if self.ranks.keeps_all:
            return net
        multiply_out(net)
        ranks, stacks = self.ranks.even(net), self.ranks.stacks(net)
        with torch.device("meta"):
            return factorize(net, ranks, None, LowRankLinear, stacks=stacks)

    def build(self, method: StageContext, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Factorize the net of the stage before, or the backbone."""
        net = multiply_out(super().build(method, previous, structure))
        if structure is not None:
            if self.layer is LowRankLinear:
                rebuild(net, structure)
            else:  # it needs the matrix, too
                factorize(net, {name: spec["rank"] for name, spec in structure.items()}, None, self.layer)
        elif not self.ranks.keeps_all:
            self._factorize(method, net, self.narrow(method, net), previous)
            self.refine(method, net, previous)
        self.achieved = self.ranks.left_of(net)
        return net

    def _factorize(self, method: StageContext, net: PreTrainedModel, rule: RankRule, previous: Path | None) -> None:
        if rule.keeps_all:
            return
        decomposer = self.decomposer(method, net, previous)
        ranks, stacks = from_first(lambda: rule.allocate(net, decomposer.sigma)), rule.stacks(net)
        if is_first():
            factorize(net, ranks, decomposer.factors, self.layer, decomposer.bias_change, stacks)
            self.factorized(decomposer, ranks)
        else:  # configure_model sends the values, which may differ between machines
            factorize(net, ranks, None, self.layer, stacks=stacks)

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Log the density, which does not change in this stage."""
        asked = self.ranks.by_density and self.ranks.price == "parameters"
        return {"density": self.achieved, "target": self.ranks.density if asked else self.achieved}
