"""Factorization of matrices by plain or weighted SVD, or under Kronecker factors, to ranks under one rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from lit_compress.data.datamodule import DataModule
from lit_compress.layers import LowRankLinear
from lit_compress.models.sites import Model, size_at
from lit_compress.models.surgery import factorize, stacked_weight
from lit_compress.numerics.decompose import Factorization, Side, weighted_svd
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.numerics.ranks import largest_rank
from lit_compress.stages.compression import Calibration, Compression, Items, Measured
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.weighting import KRONECKER, Weighted, calibration_for, labels_of
from lit_compress.tasks.base import TaskType
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

PLAIN = Weighted(weighting="none")


class ByRule(Compression):
    """A compression to the density of a rule for ranks, under a weighting."""

    def __init__(self, rule: RankRule, settings: Weighted = PLAIN) -> None:
        self.rule, self.density, self.round_to, self.settings = rule, rule.density, rule.round_to, settings
        self.decided_by_data, self.uniform = rule.allocation == "global", settings is not PLAIN
        self.moments = settings.weighting if settings.weighting in KRONECKER else None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is removed."""
        return self.rule.keeps_all

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether the calibration needs the labels of the data: not if they follow the model's distribution."""
        return kind.reads_labels or (self.settings.weighting == "fisher" and kind.loss != "vectors")

    def drawn(self, data: DataModule) -> int:
        """Return the number of the calibration examples."""
        return self.settings.drawn(data)

    def record(self, data: DataModule) -> dict[str, Any] | None:
        """Return the report's entry on the calibration; None for weightings that have none."""
        settings = self.settings
        if self.moments is None:
            return None
        return {
            "weighting": self.moments,
            "labels": labels_of(data.record) if self.moments == "kfac" else None,
            "examples": settings.drawn(data),
            "removes": settings.removal,
        }


class Factors(ByRule):
    """Low rank: factors in the places of matrices, and stacks of them, of ranks under one rule.

    ``side``: which factor gets the singular values in a weighted or a plain SVD.
    """

    name = "ranks"

    def __init__(self, rule: RankRule, settings: Weighted = PLAIN, side: Side = "in") -> None:
        super().__init__(rule, settings)
        self.side = side

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the weighting's statistic."""
        return calibration_for(self.settings, data)

    def svd(
        self, net: Model, sites: Sequence[str], weight: Tensor, statistics: dict[Any, Any], components: int
    ) -> Factorization:
        """Return the decomposition of ``weight`` [out, in] of a site of ``net``, or of several stacked by rows.

        The ``statistics`` are Kronecker factors by site, equation (M) of numerics/kronecker.py, which are released, or
        importances of a side; without any it is the plain SVD. The mean of the inputs goes into the biases if all of
        the sites have one.
        """
        name, modules = sites[0], [net.get_submodule(site) for site in sites]
        if self.moments is None:
            return weighted_svd(weight, statistics.get(name), self.side, name=name, components=components)
        own = [statistics.pop(site) for site in sites]
        inputs, mean = own[0].inputs(), own[0].mean if all(each.bias is not None for each in modules) else None
        sizes = gradients = None
        if self.moments == "kfac":
            sizes = [size_at(net, site)[0] for site in sites]
            gradients = (own.pop(0).gradients() for _ in range(len(own)))  # the memory of one at a time
        return kronecker_svd(weight, inputs, gradients, sizes=sizes, mean=mean, name=name, components=components)

    def check(self, net: Model) -> None:
        """Refuse a rank that makes no matrix smaller, a density below one component of each, and a shape."""
        self.rule.allocate(net)
        if self.rule.uniform and self.settings is not PLAIN:
            raise UserError(
                "model.shape: 'uniform' is for heads and neurons, and retrain.removes 'components' makes factors; "
                "nearest: structures"
            )

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield of every matrix or stack its factors, with all singular values and the mean of its inputs.

        The factors have the rule's rank, or, if singular values decide, as many components as make the matrix smaller.
        """
        even = self.rule.allocate(net) if self.rule.allocation == "uniform" else None
        members = {name: sites for name, sites in self.rule.members(net).items() if name in names}
        for name, sites in track(members.items(), "singular values", len(members)):
            if even is not None and name not in even:
                continue
            weight = stacked_weight(net, sites)
            rank = max(1, largest_rank(*weight.shape)) if even is None else even[name]
            svd = self.svd(net, sites, weight, statistics, rank)
            left, right = svd.factors(rank)
            kept = {"sigma": svd.sigma, "left": left, "right": right}
            if svd.mean is not None:
                kept["mean"] = svd.mean
            del svd
            yield sites, {f"{name}.{key}": value for key, value in kept.items()}

    def plan(self, net: Model, measured: Measured | None = None) -> dict[str, int]:
        """Return {site: rank}; without singular values, for matrices that matter alike."""
        return self.rule.allocate(net, None if measured is None else lambda name: measured[f"{name}.sigma"])

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
