"""Removal of heads and neurons as a compression (units.py).

The removed units are chosen in one queue over all blocks, so of every sub-layer the order and the costs of its units
are kept. The update of the rest (U) depends on the removed units, so the second moment of the last matrix' inputs is
also kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration.moments import Gram, KroneckerFactors
from lit_compress.models.outline import spread_evenly
from lit_compress.models.prices import unit_price, unit_prices
from lit_compress.models.sites import sublayers
from lit_compress.models.uniform_shape import even_counts
from lit_compress.numerics.kronecker import GRADIENT_DAMPING, INPUT_DAMPING
from lit_compress.numerics.structures import RemovalPath
from lit_compress.stages.compression import Compression, Measured
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import Units, choose_uniform, choose_units, cut_removed, find_units, update_rest
from lit_compress.stages.weighting import Weighted, biased_sites, calibration_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.stages.calibration import Calibration


class UnitRemoval(Compression):
    """Removes heads, neurons and sub-layers.

    Args:
        settings: the weighting.
        rule: has the density.
    """

    name = "units"

    def __init__(self, settings: Weighted, rule: RankRule) -> None:
        self.settings, self.rule = settings, rule

    def calibration(self, net: PreTrainedModel, data: DataModule) -> Calibration | None:
        """Return the moments of the last matrices of the sub-layers."""
        return calibration_for([self.settings], data, [part.last for part in sublayers(net, removable=False)])

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
            net, statistics, biased_sites(net), (INPUT_DAMPING, GRADIENT_DAMPING), lambda *_: 0.0,
            settings.weighting == "kfac", rule.round_to, rule.uniform,
        )  # fmt: skip
        for name, unit in units.items():
            kept = statistics.pop(name).stored_inputs() | {"costs": unit.path.costs, "sizes": unit.path.sizes().long()}
            kept["order"] = torch.cat([torch.zeros(0, dtype=torch.int64), *unit.path.steps])
            yield (name,), {f"{name}.{key}": value for key, value in kept.items()}

    def plan(self, net: PreTrainedModel) -> dict[str, Tensor]:
        """Return the removed units by last matrix: the same share everywhere."""
        if self.rule.uniform:
            left = even_counts(net, self.rule.density, self.rule.round_to)
        else:
            left = spread_evenly(net, self.rule.density, whole=True)
        prices = unit_prices(net, sublayers(net, removable=False))
        return {name: torch.arange(kept, prices[name].count) for name, kept in left.items()}

    def choose(self, net: PreTrainedModel, measured: Measured) -> tuple[dict[str, Tensor], float]:
        """Return the removed units by last matrix, and the estimated addition to an example's loss."""
        units, rule = {}, self.rule
        for part in sublayers(net, removable=False):
            if f"{part.last}.costs" in measured:
                order, sizes, costs = (measured[f"{part.last}.{key}"] for key in ("order", "sizes", "costs"))
                path = RemovalPath(order.split(sizes.tolist()), costs)
                units[part.last] = Units(part, path, rule.unit_price(net, part), unit_price(net, part).count)
        saving = rule.total(net) * (1 - rule.density)
        if rule.uniform:
            return choose_uniform(net, units, saving, rule.round_to)
        return choose_units(units, saving, rule.round_to)

    def apply(self, net: PreTrainedModel, chosen: dict[str, Tensor], measured: Measured | None) -> None:
        """Remove heads and neurons, and the sub-layers that have none left."""
        for name, gone in chosen.items() if measured is not None else ():
            moments = KroneckerFactors.of_stored_inputs(
                {key: measured[f"{name}.{key}"] for key in ("mean", "tokens", "inputs")}  # type: ignore[index]
            )
            biased = frozenset() if net.get_submodule(name).bias is None else frozenset([name])
            update_rest(net, {name: moments}, {name: gone}, biased, INPUT_DAMPING)
        cut_removed(net, chosen, self.rule.uniform)

    def told(self, net: PreTrainedModel, chosen: dict[str, Tensor]) -> dict[str, Any]:
        """Return how many heads or neurons are left."""
        prices = unit_prices(net, sublayers(net, removable=False))
        return {"units": {name: prices[name].count - len(gone) for name, gone in chosen.items()}}
