"""Hard-concrete gates: learned relaxed 0-1 variables, and how large a net they leave.

Louizos, Welling, Kingma 2018, "Learning Sparse Neural Networks through L0 Regularization",
https://arxiv.org/abs/1712.01312, with the constants of CoFi (Xia et al. 2022) and SP3. With a = log_alpha,
u ~ U(EPS, 1 - EPS), LOWER = -0.1, UPPER = 1.1, TEMPERATURE = 2/3:

    s = sigmoid((log u - log(1 - u) + a) / TEMPERATURE);  z = clamp(LOWER + (UPPER - LOWER) s, 0, 1)
    P(z > 0) = sigmoid(a - TEMPERATURE log(-LOWER / UPPER))

A gate stands for a grid of units, [groups, size]: heads by layer, neurons by layer, hidden dimensions in one group.
The groups of a gate keep units of their own, the best by a. Everything is float32; autocast does not reach it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LOWER, UPPER, TEMPERATURE, EPS = -0.1, 1.1, 2 / 3, 1e-6
SHIFT = -TEMPERATURE * math.log(-LOWER / UPPER)  # P(z > 0) = sigmoid(a + SHIFT)


def sample(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return gates z in [0, 1], differentiable in ``log_alpha``.

    Args:
        log_alpha: float32, any shape.
        uniform: draws from U(0, 1); its shape, to which ``log_alpha`` is broadcast, is the result's.
    """
    u = uniform.clamp(EPS, 1 - EPS)
    s = ((u.log() - torch.log1p(-u) + log_alpha) / TEMPERATURE).sigmoid()
    return (LOWER + (UPPER - LOWER) * s).clamp(0, 1)


def probability(log_alpha: Tensor) -> Tensor:
    """Return P(z > 0), clamped to [EPS, 1 - EPS]; there it has no gradient."""
    return (log_alpha + SHIFT).sigmoid().clamp(EPS, 1 - EPS)


def soft(log_alpha: Tensor) -> Tensor:
    """Return the value of a gate that is kept when nothing is drawn: sigmoid(0.8 a / TEMPERATURE)."""
    return (0.8 / TEMPERATURE * log_alpha).sigmoid()


def kept_units(log_alpha: Tensor, least: int = 0, offset: float = 0.0) -> Tensor:
    """Return how many units every group keeps: floor(sum P(z > 0) + 1/2), so one of its own stays iff P >= 1/2.

    Args:
        log_alpha: [groups, size].
        least: units a group keeps in any case.
        offset: added to ``log_alpha``; moves all groups together.

    Returns:
        int64 [groups].
    """
    expected = (log_alpha.double() + (offset + SHIFT)).sigmoid().sum(1)
    return (expected + 0.5).floor().long().clamp(least, log_alpha.shape[1])


def keep_best(log_alpha: Tensor, kept: Tensor) -> Tensor:
    """Return the mask of the ``kept`` (int64 [groups]) best units of every group; of equal ones, those that come first.

    Args:
        log_alpha: [groups, size].

    Returns:
        bool [groups, size], True = keep.
    """
    order = log_alpha.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1) < kept[:, None]  # a unit's place in the order


@dataclass(frozen=True)
class Weights:
    """Weights that stand or fall together: ``number`` of them for every combination of kept units.

    A matrix whose columns are hidden dimensions and whose rows are the neurons of layer 3, all of which is gone if the
    sub-layer is: ``Weights(1, ("hidden", 0), ("neurons", 3), ("ffn", 3))``.

    Attributes:
        number: weights per combination.
        gates: (name of a gate, group); no gate twice.
    """

    number: int
    gates: tuple[tuple[str, int], ...]

    def __init__(self, number: int, *gates: tuple[str, int]) -> None:
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "gates", gates)


class Size(nn.Module):
    """How many weights are left: a sum of products of kept units, the same whether those are counted or expected.

    With P(z > 0) in place of z > 0 it is the expectation, since units are independent and no product has a gate twice
    (CoFi's expected size; SP3 Eq. 30).

    Args:
        weights: all that is counted.
        shapes: name of a gate -> (groups, size).
        whole: what a density is a fraction of; None for all of it.
    """

    index: Tensor
    numbers: Tensor

    def __init__(
        self, weights: Sequence[Weights], shapes: Mapping[str, tuple[int, int]], whole: int | None = None
    ) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        starts, end = {}, 0
        for name, (groups, _) in self.shapes.items():
            starts[name], end = end, end + groups
        columns = max((len(part.gates) for part in weights), default=1)
        index = torch.full((columns, len(weights)), end)  # the last one is always 1
        for i, part in enumerate(weights):
            for column, (name, group) in enumerate(part.gates):
                assert group < self.shapes[name][0], (name, group)
                index[column, i] = starts[name] + group
        self.register_buffer("index", index, persistent=False)
        numbers = torch.tensor([part.number for part in weights], dtype=torch.int64)
        self.register_buffer("numbers", numbers, persistent=False)
        everything = {name: torch.full((groups,), size) for name, (groups, size) in self.shapes.items()}
        self.total = int(self(everything)) if whole is None else whole

    def forward(self, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the number of weights.

        Args:
            kept: name of a gate -> units that every group keeps, [groups]: int64 counts, or float sums of P(z > 0).

        Returns:
            0-dim, of the dtype of ``kept``: exact for int64.
        """
        units = torch.cat([kept[name] for name in self.shapes])
        units = torch.cat([units, units.new_ones(1)])
        parts = self.numbers.to(units.dtype)
        for row in self.index:
            parts = parts * units[row]
        return parts.sum()

    def density(self, log_alphas: Mapping[str, Tensor]) -> Tensor:
        """Return the expected fraction of the weights that is left, 0-dim, differentiable."""
        return self({name: probability(log_alphas[name]).sum(1) for name in self.shapes}) / self.total

    def count(self, kept: Mapping[str, Tensor]) -> int:
        """Return the number of weights left with ``kept`` units, or True entries of masks [groups, size]."""
        return int(self({name: kept[name].sum(1) if kept[name].ndim == 2 else kept[name] for name in self.shapes}))


@torch.no_grad()
def fit_budget(
    log_alphas: Mapping[str, Tensor], size: Size, budget: int, least: Mapping[str, int], finest: str | None
) -> dict[str, Tensor]:
    """Choose the units to keep so that at most ``budget`` weights are left, and as many as units allow.

    One offset is added to all log_alpha, the largest with which :func:`kept_units` fits; where the gates have learned
    to meet the budget it is about 0. What is left of the budget goes to the best units that fit into it, of coarse
    gates first: two layers that learned the same would else go together where one is enough.

    Args:
        log_alphas: name of a gate -> [groups, size], on the CPU.
        size: what is counted, on the CPU.
        budget: weights to keep.
        least: name of a gate -> units every group keeps in any case; 0 for those not named.
        finest: gate of the cheapest units, the last that is filled; None leaves the rest of the budget.

    Returns:
        Name of a gate -> bool [groups, size], True = keep.
    """

    def kept(offset: float) -> dict[str, Tensor]:
        return {name: kept_units(a, least.get(name, 0), offset) for name, a in log_alphas.items()}

    low, high = -64.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if size.count(kept(middle)) <= budget else (low, middle)
    chosen = kept(low)
    if finest is not None:
        for name in sorted(log_alphas, key=lambda name: (name == finest, -_cost(chosen, size, name))):
            _fill(chosen, log_alphas[name], size, budget, name)
    return {name: keep_best(a, chosen[name]) for name, a in log_alphas.items()}


def _cost(kept: dict[str, Tensor], size: Size, name: str) -> int:
    """Return the weights of one more unit of a gate, where it costs most."""
    groups, now = torch.arange(len(kept[name])), size.count(kept)
    return max(size.count(kept | {name: kept[name] + (groups == group)}) - now for group in groups.tolist())


def _fill(kept: dict[str, Tensor], log_alpha: Tensor, size: Size, budget: int, name: str) -> None:
    """Add the best units of one gate while they fit, one after another, in place."""
    groups, most = log_alpha.shape
    ordered = log_alpha.sort(dim=1, descending=True).values.tolist()
    waiting = [
        (-ordered[group][rank], group) for group in range(groups) for rank in range(int(kept[name][group]), most)
    ]
    full: set[int] = set()
    for _, group in sorted(waiting):
        if group in full:
            continue
        before = size.count(kept)
        kept[name][group] += 1
        after = size.count(kept)
        if after > budget or after == before:  # it does not fit, or counts for nothing
            kept[name][group] -= 1
            full.add(group)
