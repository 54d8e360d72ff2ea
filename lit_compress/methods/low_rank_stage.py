"""Factorize a net and retrain it: what the low-rank methods share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lit_compress.budget import stored_density
from lit_compress.decompose import Axis, Importance, SigmaSide, WeightedSVD, decompose, weighted_svd
from lit_compress.errors import UserError
from lit_compress.layers import LowRankLinear
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.ranks import RankRule
from lit_compress.surgery import Structure, factorize

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class WeightedDecomposer:
    """How a method takes the matrices of a net apart.

    Attributes:
        importance: by site, what :func:`~lit_compress.decompose.decompose` takes for ``axis``; None for the plain SVD.
        axis: what the importance belongs to.
        power: its exponent.
        sigma_side: where the singular values of the plain SVD go.
    """

    importance: dict[str, Importance] | None = None
    axis: Axis = "out"
    power: float = 0.5
    sigma_side: SigmaSide | None = None

    def factors(self, name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the matrix of site ``name``."""
        return decompose(weight, rank, self._of(name), self.axis, self.power, self.sigma_side, name)

    def svd(self, name: str, weight: Tensor) -> WeightedSVD:
        """Return the whole weighted SVD of the matrix of site ``name``: every rank of it.

        Raises:
            UserError: an element-wise weighting has none.
        """
        if self.axis == "element":
            raise UserError("axis: 'element' has no singular values, every rank is solved by itself; nearest: both")
        return weighted_svd(weight, self._of(name), self.axis, self.power, self.sigma_side, name)

    def sigma(self, name: str, weight: Tensor) -> Tensor:
        """Return the singular values of the weighted matrix, falling, float64."""
        return self.svd(name, weight).sigma

    def _of(self, name: str) -> Importance | None:
        return None if self.importance is None else self.importance[name]


class LowRankRetraining(Stage):
    """The net of the stage before, its sites replaced by products of two factors, all of it retrained.

    Args:
        settings: how it trains.
        ranks: what decides the ranks.
    """

    layer: type[LowRankLinear] = LowRankLinear  # what takes a Linear's place

    def __init__(self, settings: Training, ranks: RankRule, distil: bool = True) -> None:
        super().__init__("retrain", settings, distil)
        self.ranks = ranks

    def decomposer(self, method: Host, net: PreTrainedModel, previous: Path | None) -> WeightedDecomposer:
        """Return how the matrices of ``net`` are taken apart; it was loaded from ``previous``, None = the backbone."""
        raise NotImplementedError

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank that makes no matrix smaller."""
        self.ranks.check(net)

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Factorize the net of the stage before, or the backbone."""
        net = super().build(method, previous, structure)
        if structure is not None:
            factorize(net, {name: spec["rank"] for name, spec in structure.items()}, None, self.layer)
        elif not self.ranks.keeps_all:
            decomposer = self.decomposer(method, net, previous)
            factorize(net, self.ranks.allocate(net, decomposer.sigma), decomposer.factors, self.layer)
        self.achieved = stored_density(net)
        return net

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show the density, which no longer changes."""
        return {"density": self.achieved, "target": self.ranks.density if self.ranks.by_density else self.achieved}
