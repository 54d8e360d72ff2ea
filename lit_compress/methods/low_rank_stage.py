"""Factorize a net and retrain it: what the low-rank methods share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.budget import allocate_ranks, stored_density
from lit_compress.layers import LowRankLinear
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.surgery import Factors, factorize, load_net

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LowRankRetraining(Stage):
    """The net of the stage before, its sites replaced by products of two factors, all of it retrained.

    Args:
        settings: how it trains.
        density: of the sites, after factorization.
        rank: the same rank for every matrix instead.
    """

    layer: type[LowRankLinear] = LowRankLinear  # what takes a Linear's place

    def __init__(self, settings: Training, density: float, rank: int | None) -> None:
        super().__init__("retrain", settings)
        self.density, self.rank = density, rank

    def factors(self, previous: Path) -> Factors:
        """Return how a matrix of the net in ``previous`` is factorized."""
        raise NotImplementedError

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank that makes no matrix smaller."""
        allocate_ranks(net, self.density, self.rank)

    def build(self, method: Host, previous: Path | None, restoring: bool) -> PreTrainedModel:
        """Factorize the net of the stage before."""
        assert previous is not None
        net = load_net(previous)
        ranks = allocate_ranks(net, self.density, self.rank)
        factorize(net, ranks, None if restoring else self.factors(previous), self.layer)
        self.achieved = stored_density(net)
        return net

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show the density, which no longer changes."""
        return {"density": self.achieved, "target": self.density}
