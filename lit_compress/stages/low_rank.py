"""Factorization of matrices by plain or weighted SVD, or under Kronecker factors, to ranks under one rule."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from lit_compress.layers import LowRankLinear
from lit_compress.models.sites import Model
from lit_compress.models.surgery import factorize, stacked_weight
from lit_compress.numerics.decompose import Factorization, SigmaSide, weighted_svd
from lit_compress.numerics.ranks import largest_rank
from lit_compress.stages.compression import Compression, Items, Measured
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.progress import track

# of name and weight [out, in] of a site, or of several stacked by rows, and the number of components; without it of all
Decomposer = Callable[..., Factorization]


class ByRule(Compression):
    """A compression to the density of a rule for ranks."""

    def __init__(self, rule: RankRule) -> None:
        self.rule, self.density, self.round_to = rule, rule.density, rule.round_to
        self.decided_by_data = rule.allocation == "global"

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is removed."""
        return self.rule.keeps_all


class Factors(ByRule):
    """Low rank: factors in the places of matrices, and stacks of them, of ranks under one rule.

    ``sigma_side``: which factor gets the singular values in the plain SVD.
    """

    name = "factors"

    def __init__(self, rule: RankRule, sigma_side: SigmaSide = "in") -> None:
        super().__init__(rule)
        self.sigma_side = sigma_side

    def decomposer(self, net: Model, statistics: dict[Any, Any]) -> Decomposer:
        """Return a decomposer of the matrices of ``net`` with ``statistics``, which it consumes."""
        return lambda name, weight, components=None: weighted_svd(
            weight, sigma_side=self.sigma_side, name=name, components=components
        )

    def check(self, net: Model) -> None:
        """Refuse a rank that makes no matrix smaller, and a density below one component of each."""
        self.rule.allocate(net)

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield of every matrix or stack its factors, with all singular values and the mean of its inputs.

        The factors have the rule's rank, or, if singular values decide, as many components as make the matrix smaller.
        """
        decomposer = self.decomposer(net, statistics)
        even = self.rule.allocate(net) if self.rule.allocation == "uniform" else None
        members = {name: sites for name, sites in self.rule.members(net).items() if name in names}
        for name, sites in track(members.items(), "singular values", len(members)):
            if even is not None and name not in even:
                continue
            weight = stacked_weight(net, sites)
            rank = max(1, largest_rank(*weight.shape)) if even is None else even[name]
            svd = decomposer(name, weight, rank)
            left, right = svd.factors(rank)
            kept = {"sigma": svd.sigma, "left": left, "right": right}
            if svd.mean is not None:
                kept["mean"] = svd.mean
            del svd
            yield sites, {f"{name}.{key}": value for key, value in kept.items()}

    def plan(self, net: Model, measured: Measured | None = None) -> dict[str, int]:
        """Return {site: rank}; without singular values, for matrices that matter alike."""
        return self.rule.allocate(net, None if measured is None else lambda name: measured[f"{name}.sigma"])

    def loss(self, net: Model, plan: dict[str, int], measured: Measured) -> float:
        """Return the half of the sum of the squared singular values that are left out."""
        known = {name: measured[f"{name}.sigma"] for name in plan if f"{name}.sigma" in measured}
        return sum(float(sigma[plan[name] :].square().sum()) for name, sigma in known.items()) / 2

    def told(self, net: Model, plan: dict[str, int]) -> dict[str, Any]:
        """Return the ranks."""
        return {"ranks": plan}

    def layer(self, net: Model) -> type[LowRankLinear]:
        """Return the class of the layers that replace Linears."""
        return LowRankLinear

    def fill(self, net: Model, plan: dict[str, int], measured: Measured | None) -> None:
        """Put factors in the places of matrices, and change biases."""
        stacks = {name: sites for name, sites in self.rule.stacks(net).items() if name in plan}
        if measured is None:
            with next(net.parameters()).device:
                factorize(net, plan, None, self.layer(net), stacks=stacks)
            return

        def factors(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
            left, right = measured[f"{name}.left"], measured[f"{name}.right"]
            # rows of `right` are contiguous as they are: a view would keep all that are not wanted
            return left[:, :rank].contiguous().to(weight.device), right[:rank].clone().to(weight.device)

        factorize(net, plan, factors, self.layer(net), lambda name: measured.get(f"{name}.mean"), stacks)
