"""Compression under a weighting: factors, or the removal of heads, neurons and sub-layers; then training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration.moments import Gram, KroneckerFactors
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.outline import spread_evenly
from lit_compress.models.prices import unit_price, unit_prices
from lit_compress.models.sites import sublayers
from lit_compress.models.uniform_shape import even_counts
from lit_compress.numerics.structures import RemovalPath
from lit_compress.stages.compression import Compression, Measured, check_count
from lit_compress.stages.low_rank import ByRule, Decomposer, Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import (
    Units,
    choose_uniform,
    choose_units,
    cut_removed,
    find_units,
    least_density,
    update_rest,
)
from lit_compress.stages.weighting import KRONECKER, Weighted, biased_sites, calibration_for, seed_of, weigh
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.stages.calibration import Calibration
    from lit_compress.tasks.base import TaskType


class _UnderWeighting(ByRule):
    """What factors and removal have in common.

    Args:
        settings: the weighting.
        rule: for the ranks, or with the density.
    """

    uniform = True

    def __init__(self, settings: Weighted, rule: RankRule) -> None:
        super().__init__(rule)
        self.settings, self.moments = settings, settings.weighting if settings.weighting in KRONECKER else None

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a scope that the weighting does not allow."""
        if self.rule.scope == "all" and self.settings.weighting not in KRONECKER:
            raise UserError(
                f"model.scope: 'all' needs whole second moments, which weighting '{self.settings.weighting}' has not; "
                "nearest: blocks"
            )

    def check_data(self, examples: int) -> None:
        """Refuse a Fisher pass or a calibration over more examples than there are."""
        name = "calibration_examples" if self.settings.weighting in KRONECKER else "fisher_examples"
        check_count(f"retrain.{name}", getattr(self.settings, name), examples)

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether the weighting needs the labels of the data."""
        return self.settings.reads_labels(kind)

    def drawn(self, data: DataModule) -> tuple[int, int | None]:
        """Return number and seed of the calibration examples."""
        return self.settings.examples(data.train_size()), seed_of(self.settings, data)

    def record(self, data: DataModule, loss: float) -> dict[str, Any] | None:
        """Return the report's entry on the calibration; None for weightings that have none.

        ``estimated_loss`` estimates the compression's addition to an example's loss; None for ``inputs``, which
        measures no loss.
        """
        settings, gradients = self.settings, self.settings.weighting == "kfac"
        if self.moments is None:
            return None
        return {
            "weighting": settings.weighting,
            "labels": settings.labels_of(data.record) if gradients else None,
            "examples": settings.examples(data.train_size()),
            "removes": settings.removal,
            "estimated_loss": loss if gradients else None,
        }


class WeightedFactors(_UnderWeighting, Factors):
    """Low rank under a weighting."""

    def check(self, net: PreTrainedModel) -> None:
        """Also refuse ranks that cannot be, and a shape."""
        self.rule.check(net)
        super().check(net)
        if self.rule.uniform:
            raise UserError(
                "model.shape: 'uniform' is for heads and neurons, and retrain.removes 'components' makes factors; "
                "nearest: structures"
            )

    def calibration(self, net: PreTrainedModel, data: DataModule) -> Calibration | None:
        """Return the weighting's statistic."""
        return calibration_for(self.settings, data, table=self.rule.table(net))

    def decomposer(self, net: PreTrainedModel, statistics: dict[str, Any]) -> Decomposer:
        """Return the decomposer with the weighting."""
        return weigh(self.settings, net, statistics, self.rule.stacks(net), True)


class UnitRemoval(_UnderWeighting):
    """Removes heads, neurons and sub-layers (units.py).

    The removed units are chosen in one queue over all blocks, so of every sub-layer the order and the costs of its
    units are kept. The update of the rest (U) depends on the removed units, so the second moment of the last matrix'
    inputs is also kept.
    """

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a scope, ranks, sub-layers that cannot be cut, and a density that cannot be reached."""
        super().check(net)
        rule = self.rule
        if rule.scope == "all":
            raise UserError(
                "retrain.removes: 'structures' counts the blocks' matrices; nearest with scope all: components"
            )
        if not rule.by_density:
            raise UserError("retrain.removes: 'structures' needs a density; give model.density")
        if rule.uniform:
            even_counts(net, rule.density, rule.round_to)
        elif rule.density < (least := least_density(net)):
            raise UserError(
                f"model.density: {rule.density} cannot be reached with retrain.removes structures, which leaves at "
                f"least one head or neuron; the smallest is {least + 5e-4:.3f}"
            )

    def calibration(self, net: PreTrainedModel, data: DataModule) -> Calibration | None:
        """Return the moments of the last matrices of the sub-layers."""
        return calibration_for(self.settings, data, [part.last for part in sublayers(net, removable=False)])

    def bytes(self, net: PreTrainedModel) -> int:
        """Return the size of the moments."""
        modules: list[Any] = [net.get_submodule(part.last) for part in sublayers(net, removable=False)]
        return 4 * sum(sum(Gram.numbers(module.in_features)) for module in modules)

    def measure(
        self, net: PreTrainedModel, names: Collection[str], statistics: dict[Any, Any]
    ) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
        """Yield of every last matrix the order and the costs of its units and the moments of its inputs."""
        settings, rule = self.settings, self.rule
        units = find_units(
            net, statistics, biased_sites(net), settings.weighting == "kfac", rule.round_to, rule.uniform
        )
        for name, unit in units.items():
            kept = statistics.pop(name).stored_inputs() | {"costs": unit.path.costs, "sizes": unit.path.sizes().long()}
            kept["order"] = torch.cat([torch.zeros(0, dtype=torch.int64), *unit.path.steps])
            yield (name,), {f"{name}.{key}": value for key, value in kept.items()}

    def plan(self, net: PreTrainedModel, measured: Measured | None = None) -> dict[str, Tensor]:
        """Return the removed units by last matrix; without costs the same share everywhere."""
        if measured is not None:
            return self._chosen(net, measured)[0]
        if self.rule.uniform:
            left = even_counts(net, self.rule.density, self.rule.round_to)
        else:
            left = spread_evenly(net, self.rule.density, whole=True)
        prices = unit_prices(net, sublayers(net, removable=False))
        return {name: torch.arange(kept, prices[name].count) for name, kept in left.items()}

    def loss(self, net: PreTrainedModel, plan: dict[str, Tensor], measured: Measured) -> float:
        """Return the estimate of the costs of the removed units."""
        return self._chosen(net, measured)[1]

    def _chosen(self, net: PreTrainedModel, measured: Measured) -> tuple[dict[str, Tensor], float]:
        """Return the removed units by last matrix, and the estimated addition to an example's loss."""
        units, rule = {}, self.rule
        for part in sublayers(net, removable=False):
            if f"{part.last}.costs" in measured:
                order, sizes, costs = (measured[f"{part.last}.{key}"] for key in ("order", "sizes", "costs"))
                path = RemovalPath(order.split(sizes.tolist()), costs)
                price = unit_price(net, part)
                units[part.last] = Units(part, path, price.weights, price.count)
        saving = dense_site_params(net) * (1 - rule.density)
        if rule.uniform:
            return choose_uniform(net, units, saving, rule.round_to)
        return choose_units(units, saving, rule.round_to)

    def fill(self, net: PreTrainedModel, plan: dict[str, Tensor], measured: Measured | None) -> None:
        """Remove heads and neurons, and the sub-layers that have none left."""
        for name, gone in plan.items() if measured is not None else ():
            moments = KroneckerFactors.of_stored_inputs(
                {key: measured[f"{name}.{key}"] for key in ("mean", "tokens", "inputs")}  # type: ignore[index]
            )
            biased = frozenset() if net.get_submodule(name).bias is None else frozenset([name])
            update_rest(net, {name: moments}, {name: gone}, biased)
        cut_removed(net, plan, self.rule.uniform)

    def told(self, net: PreTrainedModel, plan: dict[str, Tensor]) -> dict[str, Any]:
        """Return how many heads or neurons are left."""
        prices = unit_prices(net, sublayers(net, removable=False))
        return {"units": {name: prices[name].count - len(gone) for name, gone in plan.items()}}


def weighted(settings: Weighted, rule: RankRule) -> Compression:
    """Return the factorization, or the removal of heads and neurons."""
    return WeightedFactors(settings, rule) if settings.removal == "components" else UnitRemoval(settings, rule)
