"""Removal of heads and neurons at once, without gates, by their cost under the Kronecker-factored Fisher information.

The equations are in numerics/structures.py: the cost of removing a unit after the best update of the rest (C), and this
update (U). Costs are on the scale of the squared singular values of a K-FAC decomposition (second-order compression,
section 5). The result has ordinary, narrower Linears. A sub-layer that loses all of its units goes as a whole: it adds
the mean of its outputs, which the last bias carries, and its matrices are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.moments import KroneckerFactors
from lit_compress.data.datamodule import DataModule
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.cut import cut_units
from lit_compress.models.outline import UniformGroup, even_counts, spread_evenly, uniform_groups
from lit_compress.models.sites import Model, SubLayer, cuttable, held_part, module_at, size_at, sublayers
from lit_compress.numerics.kronecker import centred, change_of_bias
from lit_compress.numerics.structures import (
    RemovalPath,
    cheapest_first,
    inverse_moment,
    removal_path,
    without_inputs,
)
from lit_compress.stages.compression import Calibration, Compression, Items, Measured
from lit_compress.stages.low_rank import ByRule, Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.weighting import Weighted, calibration_for
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

CHUNK = 0.04  # share of the neurons left that go at one step; heads go one by one


@dataclass(frozen=True)
class Units:
    """The heads of an attention or the neurons of a feed-forward network, in the order in which they would go.

    Attributes:
        path: the steps, with their costs.
        price: weights of one unit, in all matrices of the sub-layer.
    """

    part: SubLayer
    path: RemovalPath
    price: int
    count: int

    def without(self, number: int) -> Tensor:
        """Return the units that stay when ``number`` have gone, bool [units]."""
        return torch.ones(self.count, dtype=torch.bool).index_fill(0, self.path.first(number), False)


def unit_inputs(net: Model, part: SubLayer) -> Tensor:
    """Return the inputs of the last matrix of ``part`` that each of its units writes, int64 [units, width]."""
    return torch.arange(size_at(net, part.last)[1]).view(part.count(net), -1)


def least_density(net: Model) -> float:
    """Return the least density that leaves ``net`` a head or a neuron; a UserError if it cannot be cut."""
    parts, total = cuttable(net, whole=True), sum(part.weights(net) for part in sublayers(net, gated=False))
    held = held_part(parts)
    least = min(part.price(net) for part in (parts if held is None else [held]))
    return (total - sum(part.weights(net) for part in parts) + least) / total


def choose_units(units: Mapping[str, Units], saving: float, round_to: int = 1) -> dict[str, int]:
    """Return how many units to remove by last matrix, in order of the cost per saved parameter.

    The last step of the queue saves more than is left to save: a head, or many neurons. So the most expensive removed
    units come back, as far as the saving allows; a sub-layer that is gone stays gone.

    Args:
        round_to: numbers of neurons are multiples of it.

    Raises:
        UserError: so much cannot be saved, or no head and no neuron would be left.
    """
    prices = {name: unit.path.sizes() * unit.price for name, unit in units.items()}
    steps = cheapest_first({name: unit.path.costs for name, unit in units.items()}, prices, saving)
    numbers = {name: int(units[name].path.sizes()[:count].sum()) for name, count in steps.items()}
    if all(number == units[name].count for name, number in numbers.items()):
        raise UserError("model.density: so small a budget leaves no head and no neuron; give a larger one")
    spare = sum(units[name].price * number for name, number in numbers.items()) - saving
    some = [name for name, number in numbers.items() if 0 < number < units[name].count]
    cost = {name: float(units[name].path.costs[steps[name] - 1] / len(units[name].path.steps[steps[name] - 1]))
            for name in some}  # fmt: skip
    for name in sorted(some, key=lambda name: -cost[name] / units[name].price):
        back = min(numbers[name], int(spare / units[name].price + 1e-9))
        back -= back % (round_to if units[name].part.kind == "ffn" else 1)
        numbers[name] -= back
        spare -= back * units[name].price
    return numbers


class UnitRemoval(ByRule):
    """Removes heads, neurons and sub-layers, which are chosen in one queue over all blocks.

    So of every sub-layer the order and the costs of its units are kept, and the second moment of the last matrix'
    inputs, as the update of the rest (U) depends on the removed units.
    """

    def check(self, net: Model) -> None:
        """Refuse ranks, sub-layers that cannot be cut, and a density that cannot be reached."""
        super().check(net)
        rule = self.rule
        if not rule.by_density:
            raise UserError("retrain.removes: 'structures' needs a density; give model.density")
        if rule.uniform:
            even_counts(net, rule.density, rule.round_to)
            return
        try:
            least = least_density(net)
        except UserError as error:
            raise UserError(f"{error}; nearest: model.shape uniform, or retrain.removes components") from error
        if rule.density < least:
            raise UserError(
                f"model.density: {rule.density} cannot be reached with retrain.removes structures, which leaves at "
                f"least one head or neuron; the smallest is {least + 5e-4:.3f}"
            )

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the moments of the last matrices of the sub-layers."""
        return calibration_for(self.settings, data, [part.last for part in sublayers(net, removable=False)])

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield of every last matrix the order and the costs of its units and the moments of its inputs."""
        rule = self.rule
        if rule.uniform:  # of the sub-layers that can lose as many units each, of all but one unit
            groups = uniform_groups(net, rule.round_to)
            parts = [part for group in groups for part in group.parts if len(group.counts) > 1]
            kept = {part.last for part in parts}
        else:
            parts = cuttable(net, whole=True)
            kept = {held.last} if (held := held_part(parts)) else set()
        parts = [part for part in parts if part.last in statistics]
        for part in track(parts, "heads and neurons", len(parts)):
            name, ffn, moment = part.last, part.kind == "ffn", statistics.pop(part.last)
            layer = module_at(net, name, nn.Linear)
            path = removal_path(
                layer.weight, moment.inputs(),
                moment.gradients() if self.moments == "kfac" else None, unit_inputs(net, part),
                mean=None if layer.bias is None else moment.mean, chunk=CHUNK if ffn else 0.0, keep=int(name in kept),
                multiple=rule.round_to if ffn else 1, name=name,
            )  # fmt: skip
            stored = moment.stored_inputs() | {"costs": path.costs, "sizes": path.sizes().long()}
            stored["order"] = torch.cat([torch.zeros(0, dtype=torch.int64), *path.steps])
            yield (name,), {f"{name}.{key}": value for key, value in stored.items()}

    def plan(self, net: Model, measured: Measured | None = None) -> dict[str, Tensor]:
        """Return the units that stay by last matrix, bool [units]; without costs the same share everywhere."""
        if measured is not None:
            units, density, step = self.units(net, measured), self.rule.density, self.rule.round_to

            def loss(group: UniformGroup) -> Tensor:
                return torch.stack([units[part.last].path.loss(group.removed) for part in group.parts]).sum(0)

            if self.rule.uniform:
                left = even_counts(net, density, step, loss)
                numbers = {name: unit.count - left[name] for name, unit in units.items()}
            else:
                numbers = choose_units(units, dense_site_params(net) * (1 - density), step)
            return {name: units[name].without(number) for name, number in numbers.items()}
        if self.rule.uniform:
            left = even_counts(net, self.rule.density, self.rule.round_to)
        else:
            left = spread_evenly(net, self.rule.density)
        counts = {part.last: part.count(net) for part in sublayers(net, removable=False)}
        return {name: torch.arange(counts[name]) < kept for name, kept in left.items()}

    def units(self, net: Model, measured: Measured) -> dict[str, Units]:
        """Return the measured units by last matrix."""
        units = {}
        for part in sublayers(net, removable=False):
            if f"{part.last}.costs" in measured:
                order, sizes, costs = (measured[f"{part.last}.{key}"] for key in ("order", "sizes", "costs"))
                path = RemovalPath(order.split(sizes.tolist()), costs)
                units[part.last] = Units(part, path, part.price(net), part.count(net))
        return units

    @torch.no_grad()
    def fill(self, net: Model, plan: dict[str, Tensor], measured: Measured | None) -> None:
        """Update the rest of the last matrices, equation (U); remove heads, neurons, and sub-layers without any."""
        for part in sublayers(net, removable=False) if measured is not None else ():
            if part.last not in plan or plan[part.last].all():
                continue
            stored = {key: measured[f"{part.last}.{key}"] for key in ("mean", "tokens", "inputs")}  # type: ignore
            moment, layer = KroneckerFactors.of_stored_inputs(stored), module_at(net, part.last, nn.Linear)
            before = layer.weight.detach().to("cpu", torch.float64, copy=True)
            mean = None if layer.bias is None else moment.mean
            inverse = inverse_moment(centred(moment.inputs(), mean), part.last)
            gone = unit_inputs(net, part)[~plan[part.last]].flatten()
            layer.weight.copy_(weight := without_inputs(before, inverse, gone))
            if mean is not None:
                layer.bias.copy_(layer.bias.cpu().double() + change_of_bias(before, weight, mean))
        cut_units(net, plan, whole=not self.rule.uniform)


def weighted(settings: Weighted, rule: RankRule) -> Compression:
    """Return the factorization, or the removal of heads and neurons."""
    return (Factors if settings.removal == "components" else UnitRemoval)(rule, settings)
