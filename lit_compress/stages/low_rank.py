"""Factorization of matrices by plain or weighted SVD, or under Kronecker factors, to ranks under one rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lit_compress.calibration.moments import KroneckerFactors
from lit_compress.data.datamodule import DataModule
from lit_compress.layers import LowRankLinear
from lit_compress.models.sites import Model, find_sites
from lit_compress.models.surgery import factorize, stacked_weight
from lit_compress.numerics.decompose import Factorization, SigmaSide, weighted_svd
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.numerics.ranks import largest_rank
from lit_compress.stages.compression import Calibration, Compression, Items, Measured
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.weighting import KRONECKER, Weighted, calibration_for, labels_of
from lit_compress.tasks.base import TaskType
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

PLAIN = Weighted(weighting="none")
# of name and weight [out, in] of a site, or of several stacked by rows, and the number of components; without it of all
Decomposer = Callable[..., Factorization]


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
        return super().drawn(data) if self.settings is PLAIN else self.settings.drawn(data)

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

    ``sigma_side``: which factor gets the singular values in the plain SVD.
    """

    name = "ranks"

    def __init__(self, rule: RankRule, settings: Weighted = PLAIN, sigma_side: SigmaSide = "in") -> None:
        super().__init__(rule, settings)
        self.sigma_side = sigma_side

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the weighting's statistic."""
        return calibration_for(self.settings, data)

    def decomposer(self, net: Model, statistics: dict[Any, Any]) -> Decomposer:
        """Return a decomposer of the matrices of ``net`` with ``statistics``, which it consumes."""
        if self.moments is not None:
            stacks = self.rule.stacks(net)
            return kronecker_decomposer(statistics, self.moments == "kfac", biased_sites(net, stacks), stacks)
        if self.settings.weighting == "fisher":
            return lambda name, weight, components=None: weighted_svd(
                weight, statistics[name].importance, "in", name=name, components=components
            )
        return lambda name, weight, components=None: weighted_svd(
            weight, sigma_side=self.sigma_side, name=name, components=components
        )

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


def biased_sites(net: Model, stacks: Mapping[str, tuple[str, ...]] | None = None) -> frozenset[str]:
    """Return the sites with a bias, which can carry the mean of their inputs.

    Of a stack all have one, or none counts.
    """
    modules: dict[str, Any] = {site.name: net.get_submodule(site.name) for site in find_sites(net)}
    biased = frozenset(name for name, module in modules.items() if module.bias is not None)
    for names in (stacks or {}).values():
        biased = biased if biased.issuperset(names) else biased.difference(names)
    return biased


def kronecker_decomposer(
    moments: MutableMapping[str, KroneckerFactors], gradients: bool = True, centred: Collection[str] = (),
    stacks: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Decomposer:  # fmt: skip
    """Return a decomposer by Kronecker factors, equation (M) of numerics/kronecker.py.

    Args:
        moments: by site; those of a matrix are taken out when it is decomposed, which frees their memory.
        gradients: True to weight by the moments of inputs and gradients (K-FAC), False by the inputs' only.
        centred: sites whose bias takes over the mean of the inputs.
        stacks: first site -> names of all sites that get one right factor.
    """

    def svd(name: str, weight: Tensor, components: int | None = None) -> Factorization:
        own = [moments.pop(site) for site in stacks.get(name, (name,))]
        inputs, mean = own[0].inputs(), own[0].mean if name in centred else None
        sizes = [each.outputs for each in own] if gradients else None
        outer = (own.pop(0).gradients() for _ in range(len(own))) if gradients else None
        return kronecker_svd(weight, inputs, outer, sizes=sizes, mean=mean, name=name, components=components)

    return svd
