"""Hard-concrete gates: learned relaxed 0-1 variables, the number of weights that they leave, and the units of a budget.

Louizos, Welling, Kingma 2018, "Learning Sparse Neural Networks through L0 Regularization",
https://arxiv.org/abs/1712.01312, with the constants of CoFi (Xia et al. 2022) and SP3. With a = log_alpha,
u ~ U(EPS, 1 - EPS), LOWER = -0.1, UPPER = 1.1, TEMPERATURE = 2/3:

    s = sigmoid((log u - log(1 - u) + a) / TEMPERATURE);  z = clamp(LOWER + (UPPER - LOWER) s, 0, 1)
    P(z > 0) = sigmoid(a - TEMPERATURE log(-LOWER / UPPER))

A gate has a grid of units, [groups, size]: heads by layer, neurons by layer, hidden dimensions in one group. Each group
keeps its own units, those with the largest a. Everything is computed in float32, also under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from lit_compress.numerics.search import largest
from lit_compress.utils.devices import double

LOWER, UPPER, TEMPERATURE, EPS = -0.1, 1.1, 2 / 3, 1e-6
SHIFT = -TEMPERATURE * math.log(-LOWER / UPPER)  # P(z > 0) = sigmoid(a + SHIFT)


def sample(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return gates z in [0, 1], differentiable in ``log_alpha``, in the shape of ``uniform``, draws from U(0, 1)."""
    u = uniform.clamp(EPS, 1 - EPS)
    s = ((u.log() - torch.log1p(-u) + log_alpha) / TEMPERATURE).sigmoid()
    return (LOWER + (UPPER - LOWER) * s).clamp(0, 1)


def probability(log_alpha: Tensor) -> Tensor:
    """Return P(z > 0), clamped to [EPS, 1 - EPS]; there it has no gradient."""
    return (log_alpha + SHIFT).sigmoid().clamp(EPS, 1 - EPS)


def soft(log_alpha: Tensor) -> Tensor:
    """Return the deterministic value of a gate that is kept: sigmoid(0.8 a / TEMPERATURE)."""
    return (0.8 / TEMPERATURE * log_alpha).sigmoid()


def kept_units(log_alpha: Tensor, least: int = 0, offset: float = 0.0) -> Tensor:
    """Return how many units every group keeps, int64 [groups]: floor(sum P(z > 0) + 1/2), 1 of 1 iff P >= 1/2.

    Args:
        log_alpha: [groups, size].
        least: number of units that a group always keeps.
        offset: added to ``log_alpha``; moves all groups together.
    """
    expected = (double(log_alpha) + (offset + SHIFT)).sigmoid().sum(1)
    return (expected + 0.5).floor().long().clamp(least, log_alpha.shape[1]).to(log_alpha.device)


def keep_best(log_alpha: Tensor, kept: Tensor) -> Tensor:
    """Return which ``kept`` units [groups] have the largest log_alpha, bool [groups, size]; of equal ones the first."""
    order = log_alpha.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1) < kept[:, None]  # a unit's place in the order


# weights of a matrix: their number for every combination of kept units of the gates, (name of a gate, group) each; for
# columns of hidden dimensions and rows of the neurons of layer 3: (1, ("hidden", 0), ("neurons", 3), ("ffn_layer", 3))
Weights = tuple[int, *tuple[tuple[str, int], ...]]


class Size(nn.Module):
    """The number of weights left, a sum of products of the numbers of kept units.

    With sums of P(z > 0) in place of numbers it is the expected number of weights, since units are independent, where
    no product has a gate twice (CoFi's expected size; SP3 Eq. 30).

    Args:
        weights: all weights that count.
        shapes: name of a gate -> (groups, size).
        whole: number of weights at density 1; None for the number with all units kept.
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
        columns = max((len(part) - 1 for part in weights), default=1)
        index = torch.full((columns, len(weights)), end)  # the last one is always 1
        for i, (_, *gates) in enumerate(weights):
            for column, (name, group) in enumerate(gates):
                assert group < self.shapes[name][0], (name, group)
                index[column, i] = starts[name] + group
        self.register_buffer("index", index, persistent=False)
        numbers = torch.tensor([number for number, *_ in weights], dtype=torch.int64)
        self.register_buffer("numbers", numbers, persistent=False)
        everything = {name: torch.full((groups,), size) for name, (groups, size) in self.shapes.items()}
        self.total = int(self(everything)) if whole is None else whole

    def forward(self, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the number of weights, 0-dim, in the dtype of ``kept``: exact for int64.

        ``kept`` is name of a gate -> number of units that every group keeps, [groups]: int64, or float sums of P(z >
        0).
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
        """Return the number of weights left with ``kept`` units, or True entries of masks [groups, size].

        They may be on another device than the buffers: masks are chosen on the CPU.
        """
        units = {name: kept[name].sum(1) if kept[name].ndim == 2 else kept[name] for name in self.shapes}
        return int(self({name: count.to(self.index.device) for name, count in units.items()}))


@torch.no_grad()
def fit_budget(
    log_alphas: Mapping[str, Tensor],
    size: Size,
    budget: int,
    least: Mapping[str, int],
    finest: str,
    steps: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Choose the units to keep, bool [groups, size] by gate: at most ``budget`` weights, as many as units allow.

    One offset is added to all log_alpha, the largest with which :func:`kept_units` meets the budget; it is about 0
    where training has met the budget. The rest of the budget goes to the units with the largest log_alpha that fit, of
    coarse gates first: otherwise two equal layers would both be removed where one is enough.

    Args:
        log_alphas: name of a gate -> [groups, size], on the CPU; units of inf are kept, units of -inf removed, whatever
            the budget.
        size: the number of weights as a function of units, on the CPU.
        budget: number of weights to keep.
        least: name of a gate -> number of units that every group always keeps; 0 for gates not named.
        finest: gate of the units with the fewest weights, which gets the rest last.
        steps: name of a gate -> number whose multiple every group keeps, or fewer, or all; 1 for gates not named.
    """

    def step(name: str) -> int:
        return (steps or {}).get(name, 1)

    def kept(offset: float) -> dict[str, Tensor]:
        chosen = {}
        for name, a in log_alphas.items():  # multiples of a step; fewer than one step, and all, stay
            count = kept_units(a, least.get(name, 0), offset)
            chosen[name] = torch.where((count < step(name)) | (count == a.shape[1]), count, count - count % step(name))
        return chosen

    peaks = [float(a.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) for a in log_alphas.values()]
    most = max(64.0, 16.0 + max(peaks))  # closes, or opens, every gate
    chosen = kept(largest(lambda offset: size.count(kept(offset)) <= budget, -most, most))
    for name in sorted(log_alphas, key=lambda name: (name == finest, -_cost(chosen, size, name))):
        _fill(chosen, log_alphas[name], size, budget, name, step(name))
    return {name: keep_best(a, chosen[name]) for name, a in log_alphas.items()}


def _cost(kept: dict[str, Tensor], size: Size, name: str) -> int:
    """Return the number of weights of one more unit of a gate, in the group where it is largest."""
    groups, now = torch.arange(len(kept[name])), size.count(kept)
    return max(size.count(kept | {name: kept[name] + (groups == group)}) - now for group in groups.tolist())


def _fill(kept: dict[str, Tensor], log_alpha: Tensor, size: Size, budget: int, name: str, step: int) -> None:
    """Add units of one gate, those with the largest log_alpha first, while they fit the budget; in place."""
    most = log_alpha.shape[1]
    ordered = log_alpha.sort(dim=1, descending=True).values.tolist()
    waiting = []
    for group, start in enumerate(kept[name].tolist()):
        stops = [start, *range(start - start % step + step, most, step), *([most] if start < most else [])]
        waiting += [(-ordered[group][begin], group, end) for begin, end in pairwise(stops)
                    if ordered[group][end - 1] > -math.inf]  # fmt: skip
    full: set[int] = set()
    for _, group, end in sorted(waiting):
        if group in full:
            continue
        now, before = size.count(kept), int(kept[name][group])
        kept[name][group] = end
        after = size.count(kept)
        if after > budget or after == now:  # it does not fit, or counts for nothing
            kept[name][group] = before
            full.add(group)
