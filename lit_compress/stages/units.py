"""Removal of heads and neurons at once, without gates, by their cost under the Kronecker-factored Fisher information.

The equations are in numerics/structures.py: the cost of removing a unit after the best update of the rest (C), and this
update (U). Costs are on the scale of the squared singular values of a K-FAC decomposition (second-order compression,
section 5). The result has ordinary, narrower Linears. A sub-layer that loses all of its units goes as a whole: it adds
the mean of its outputs, which the last bias carries, and its matrices are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.calibration.moments import KroneckerFactors
from lit_compress.models.cut import SUBLAYER_GATES, cut_closed, cut_units
from lit_compress.models.prices import unit_price, unit_prices
from lit_compress.models.sites import SubLayer, held_part, of_kind, sublayers
from lit_compress.models.uniform_shape import kept_by_part, uniform_groups
from lit_compress.numerics.kronecker import centred, corrected_bias
from lit_compress.numerics.structures import (
    RemovalPath,
    cheapest_first,
    convex_path,
    inverse_moment,
    removal_path,
    uniform_options,
    without_inputs,
)
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 0.04  # share of the neurons left that go at one step; heads go one by one


@dataclass(frozen=True)
class Units:
    """The heads of an attention or the neurons of a feed-forward network, in the order in which they would go.

    Attributes:
        part: the sub-layer.
        path: the steps, with their costs.
        price: weights of one unit, in all matrices of the sub-layer.
        count: number of units.
    """

    part: SubLayer
    path: RemovalPath
    price: int
    count: int


def unit_inputs(net: PreTrainedModel, part: SubLayer) -> Tensor:
    """Return the inputs of the last matrix of ``part`` that each of its units writes, int64 [units, width]."""
    price = unit_price(net, part)
    return torch.arange(price.sizes[part.last][1]).view(price.count, -1)


def least_density(net: PreTrainedModel) -> float:
    """Return the least density that leaves ``net`` a head or a neuron; only shapes are read.

    Raises:
        UserError: sub-layers of its architecture cannot be cut.
    """
    parts = sublayers(net)
    prices, held = unit_prices(net, parts), held_part(parts)
    least = min(price.weights for price in prices.values()) if held is None else prices[held.last].weights
    return least / sum(price.whole for price in prices.values())


def find_units(
    net: PreTrainedModel,
    moments: Mapping[str, KroneckerFactors],
    biased: frozenset[str],
    gradients: bool = True,
    round_to: int = 1,
    uniform: bool = False,
) -> dict[str, Units]:
    """Return by last matrix the units of the sub-layers of the dense ``net``, of :func:`held_part` all but one.

    Args:
        net: dense.
        moments: Kronecker factors by site; with one block's sites, for the sub-layers of this block alone.
        biased: sites whose bias takes over the mean of the inputs.
        gradients: False to weigh all outputs alike.
        round_to: neurons go so that a multiple of it is left.
        uniform: of the sub-layers that can lose as many units each (models/uniform_shape.py), of all but one unit.

    Raises:
        UserError: sub-layers of its architecture cannot be cut, or a moment is not usable.
    """
    units = {}
    if uniform:
        parts = [part for group in uniform_groups(net, round_to) for part in group.parts if len(group.counts) > 1]
        kept = {part.last for part in parts}
    else:
        parts = sublayers(net)
        held = held_part(parts)
        kept = set() if held is None else {held.last}
    parts = [part for part in parts if part.last in moments]
    for part in track(parts, "heads and neurons", len(parts)):
        name, groups = part.last, unit_inputs(net, part)
        layer: Any = net.get_submodule(name)
        moment = moments[name]
        path = removal_path(
            layer.weight, moment.inputs(), moment.gradients() if gradients else None, groups,
            mean=moment.mean if name in biased else None, chunk=CHUNK if part.kind == "ffn" else 0.0,
            keep=int(name in kept), multiple=round_to if part.kind == "ffn" else 1, name=name,
        )  # fmt: skip
        units[name] = Units(part, path, unit_price(net, part).weights, len(groups))
    return units


def choose_units(units: Mapping[str, Units], saving: float, round_to: int = 1) -> tuple[dict[str, Tensor], float]:
    """Choose the units to remove, in order of the cost per saved parameter.

    The last step of the queue saves more than is left to save: a head, or many neurons. So the most expensive removed
    units come back, as far as the saving allows; a sub-layer that is gone stays gone.

    Args:
        units: as :func:`find_units` returns them.
        saving: weights to remove in all.
        round_to: numbers of neurons are multiples of it.

    Returns:
        The units by last matrix, int64 [units], and the estimate of what their removal adds to an example's loss.

    Raises:
        UserError: so much cannot be saved, or no head and no neuron would be left.
    """
    costs = {name: unit.path.costs for name, unit in units.items()}
    saved = {name: unit.path.sizes() * unit.price for name, unit in units.items()}
    hulls = {name: convex_path(costs[name], saved[name]) for name in costs}
    taken = cheapest_first({n: hull[0] for n, hull in hulls.items()}, {n: hull[1] for n, hull in hulls.items()}, saving)
    steps = {name: hulls[name][2][count] for name, count in taken.items()}
    numbers = {name: int(units[name].path.sizes()[:count].sum()) for name, count in steps.items()}
    if all(number == units[name].count for name, number in numbers.items()):
        raise UserError("model.density: so small a budget leaves no head and no neuron; give a larger one")
    _give_back(units, steps, numbers, saving, round_to)
    removed = {name: units[name].path.first(number) for name, number in numbers.items()}
    losses = [units[name].path.loss(torch.tensor([number])) for name, number in numbers.items() if number]
    return removed, sum(float(loss) for loss in losses) / 2


def _give_back(
    units: Mapping[str, Units], steps: Mapping[str, int], numbers: dict[str, int], saving: float, round_to: int
) -> None:
    """Lower the ``numbers`` of removed units, in place, while they still save enough: the most expensive ones first."""
    spare = sum(units[name].price * number for name, number in numbers.items()) - saving
    some = [name for name, number in numbers.items() if 0 < number < units[name].count]
    cost = {name: float(units[name].path.costs[steps[name] - 1] / len(units[name].path.steps[steps[name] - 1]))
            for name in some}  # fmt: skip
    for name in sorted(some, key=lambda name: -cost[name] / units[name].price):
        back = min(numbers[name], int(spare / units[name].price + 1e-9))
        back -= back % (round_to if units[name].part.kind == "ffn" else 1)
        numbers[name] -= back
        spare -= back * units[name].price


def choose_uniform(
    net: PreTrainedModel, units: Mapping[str, Units], saving: float, round_to: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Choose the units to remove, as many in every layer: the numbers of the smallest estimated loss.

    Args:
        net: dense; only shapes are read.
        units: as :func:`find_units` returns them for ``uniform``.
        saving: weights to remove in all.
        round_to: numbers of neurons are multiples of it.

    Returns:
        The units by last matrix, int64 [units], and the estimate of what their removal adds to an example's loss.

    Raises:
        UserError: so much cannot be saved.
    """
    groups = [group for group in uniform_groups(net, round_to) if len(group.counts) > 1]
    own = [[units[part.last] for part in group.parts] for group in groups]
    losses = [
        torch.stack([unit.path.loss(group.removed) for unit in members]).sum(0)
        for group, members in zip(groups, own, strict=True)
    ]
    savings = [
        group.removed.double() * sum(unit.price for unit in members) for group, members in zip(groups, own, strict=True)
    ]
    options = uniform_options(losses, savings, saving)
    if options is None:
        raise UserError("model.density: so small a budget leaves no head and no neuron in a layer; give a larger one")
    left = kept_by_part(groups, options)
    removed = {name: unit.path.first(unit.count - left[name]) for name, unit in units.items()}
    return removed, sum(float(loss[option]) for loss, option in zip(losses, options, strict=True)) / 2


@torch.no_grad()
def update_rest(
    net: PreTrainedModel,
    moments: Mapping[str, KroneckerFactors],
    removed: Mapping[str, Tensor],
    biased: frozenset[str],
) -> None:
    """Update the rest of the last matrices of the dense ``net``, in place, equation (U).

    Args:
        net: dense.
        moments: Kronecker factors by site.
        removed: units by last matrix, int64 [units]; sub-layers whose last matrix is not there stay as they are.
        biased: sites whose bias takes over the mean of the inputs.
    """
    for part in sublayers(net, removable=False):
        name = part.last
        if len(removed.get(name, ())):
            mean = moments[name].mean if name in biased else None
            layer: Any = net.get_submodule(name)
            before, inputs = layer.weight.detach().clone(), unit_inputs(net, part)[removed[name]].flatten()
            inverse = inverse_moment(centred(moments[name].inputs(), mean), name)  # type: ignore[arg-type]
            weight = without_inputs(before.cpu().double(), inverse, inputs)
            layer.weight.copy_(weight)
            if mean is not None:
                layer.bias.copy_(corrected_bias(layer.bias, before, weight, mean))


@torch.no_grad()
def cut_removed(net: PreTrainedModel, removed: Mapping[str, Tensor], uniform: bool = False) -> None:
    """Remove heads, neurons and sub-layers of ``net``, with or without values, in place.

    Args:
        net: dense.
        removed: as for :func:`update_rest`.
        uniform: every layer loses as many and keeps some, also where sub-layers cannot go as a whole.
    """
    parts = [part for part in sublayers(net, removable=not uniform) if part.last in removed]
    kept = {part.last: torch.ones(len(unit_inputs(net, part))).index_fill(0, removed[part.last], 0.0) for part in parts}
    if uniform:
        cut_units(net, {name: units > 0 for name, units in kept.items()})
        return
    open_units: dict[str, Tensor] = {}
    for kind, (layer, unit) in SUBLAYER_GATES.items():
        if group := of_kind(parts, kind):
            open_units[layer] = torch.ones(len(group), 1)  # closes with the last of its units
            open_units[unit] = torch.stack([kept[part.last] for part in group])
    cut_closed(net, open_units, constant=True, parts=parts)
