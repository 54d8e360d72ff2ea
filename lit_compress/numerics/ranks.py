"""The rank of every matrix from a density, a rank ratio, or one budget for all matrices.

A matrix that a factorization would not make smaller stays dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor

import torch
from torch import Tensor

from lit_compress.numerics.search import largest
from lit_compress.utils.errors import UserError

Shape = tuple[int, int]  # out, in


def break_even_rank(out_features: int, in_features: int) -> float:
    """Return out * in / (out + in), below which factors have fewer parameters than the matrix (384 for 768 x 768)."""
    return out_features * in_features / (out_features + in_features)


def rank_for_density(density: float, out_features: int, in_features: int) -> int:
    """Return the largest rank whose factors have at most ``density`` of the parameters; at least 1.

    floor(density * out * in / (out + in)), the rule of SVD-LLM.

    Raises:
        UserError: ``density`` is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:
        raise UserError(f"density {density} is not a kept fraction; valid: above 0, at most 1")
    rank = density * break_even_rank(out_features, in_features)
    return max(1, floor(rank + 1e-9))  # the density of a rank must return that rank


def rank_for_ratio(rank_ratio: float, out_features: int, in_features: int) -> int:
    """Return floor(rank_ratio * min(out, in)), at least 1; the rule of FWSVD: 0.33 of 768 is 253.

    Raises:
        UserError: ``rank_ratio`` is not in (0, 1].
    """
    if not 0.0 < rank_ratio <= 1.0:
        raise UserError(f"rank_ratio {rank_ratio} is not a fraction of the full rank; valid: above 0, at most 1")
    return max(1, floor(rank_ratio * min(out_features, in_features) + 1e-9))


def largest_rank(out: int, inner: int) -> int:
    """Return the largest rank whose factors have fewer parameters than out x inner."""
    return ceil(out * inner / (out + inner)) - 1


def stored(out: int, inner: int, rank: int, pivot: bool = False, rows: int = 0) -> int:
    """Return the number of stored parameters of an out x inner matrix at ``rank``, the dense one if factors are larger.

    In pivot form (numerics/pivot.py) factors of rank k have k^2 parameters fewer, and with kept ``rows`` next to them k
    fewer for each: these have no row in the left factor.
    """
    factors = rank * (out + inner) + rows * inner
    if factors >= out * inner:
        return out * inner
    return factors - (rank * (rank + rows) if pivot else 0)


def pivot_rank(density: float, out: int, inner: int) -> int:
    """Return the largest rank whose pivot form has at most ``density`` of the parameters; at least 1.

    The factors are also smaller than the matrix, so that nothing is larger before the pivot form is made.
    """

    def fits(rank: int) -> bool:
        return stored(out, inner, rank, pivot=True) <= density * out * inner + 1e-6

    return largest(fits, 1, max(1, largest_rank(out, inner)))


def rounded(number: int, multiple: int) -> int:
    """Return the largest multiple that is not above ``number``; a number below all of them stays unchanged.

    >>> rounded(93, 8), rounded(5, 8)
    (88, 5)
    """
    return number - number % multiple if number >= multiple else number


@dataclass(frozen=True)
class Price:
    """The cost of a factorized matrix at a rank, and of the dense one: parameters, FLOPs or milliseconds.

    Attributes:
        component: of one more rank, above 0.
        dense: of the whole matrix, or of all stacked matrices.
        fixed: of factors at any rank, e.g. of a second kernel.
        pivot: factors of rank k are cheaper by k^2 of it, as they are stored in pivot form.
    """

    component: float
    dense: float
    fixed: float = 0.0
    pivot: float = 0.0

    def at(self, rank: int) -> float:
        """Return the price at a rank; dense where factors would not be cheaper."""
        return self.fixed + rank * (self.component - rank * self.pivot) if self.saves(rank) else self.dense

    def each(self, ranks: int) -> Tensor:
        """Return the price of every component, from the first on, float64 [ranks]."""
        more = self.component - self.pivot * (2 * torch.arange(ranks, dtype=torch.float64) + 1)
        return more.clamp_min(self.component / 4) if self.pivot else more  # never free, at ranks that save nothing

    def saves(self, rank: int) -> bool:
        """Return whether factors of this rank are cheaper than the dense matrix."""
        return self.fixed + rank * self.component < self.dense


def allocate(sigma: Mapping[str, Tensor], prices: Mapping[str, Price], budget: float) -> dict[str, int]:
    """Spend a budget on the components of all matrices that are worth most for their price.

    One threshold on sigma_j ** 2 / price holds for all matrices; sigma falls, so each keeps a prefix. Every matrix
    keeps at least one component. In pivot form later components are cheaper; each is worth at most as much as the one
    before it. With the singular values of a Fisher-weighted matrix the sum over dropped components is the second-order
    estimate of the loss it costs (second-order compression, section 3).

    Args:
        sigma: singular values by matrix, falling; matrices that are stacked on one right factor count as one.
        prices: by matrix.
        budget: not exceeded, unless one component each is more.

    Returns:
        rank by matrix; a matrix whose factors would not be cheaper is left out and stays dense.
    """
    worth = {
        name: (values.double() ** 2 / prices[name].each(len(values)).to(values.device)).cummin(0).values
        for name, values in sigma.items()
    }
    thresholds = torch.cat(list(worth.values())).sort(descending=True).values
    thresholds = torch.cat([thresholds.new_full((1,), torch.inf), thresholds])  # at the first, one component each

    def ranks(threshold: Tensor) -> dict[str, int]:
        return {name: max(1, int((values >= threshold).sum())) for name, values in worth.items()}

    def size(chosen: dict[str, int]) -> float:
        return sum(prices[name].at(rank) for name, rank in chosen.items())

    last = largest(lambda i: size(ranks(thresholds[i])) <= budget, 0, len(thresholds) - 1)
    chosen = ranks(thresholds[last])
    if last + 1 < len(thresholds):  # many components may be worth the same: those that are affordable are kept
        left = budget - size(chosen)
        for name, rank in ranks(thresholds[last + 1]).items():
            price = prices[name]
            while chosen[name] < rank and (more := price.at(chosen[name] + 1) - price.at(chosen[name])) <= left:
                chosen[name], left = chosen[name] + 1, left - more
    return {name: rank for name, rank in chosen.items() if prices[name].saves(rank)}


def allocate_in_steps(
    sigma: Mapping[str, Tensor], prices: Mapping[str, Price], budget: float, step: int
) -> dict[str, int]:
    """Spend a budget as :func:`allocate` does, on so many components of a matrix at a time.

    Args:
        sigma: as there.
        prices: as there.
        budget: not exceeded, unless one step each is more.
        step: ranks are multiples of it, except if a matrix has fewer components.
    """
    if step == 1:
        return allocate(sigma, prices, budget)
    groups, coarse = {}, {}
    for name, values in sigma.items():
        energy = torch.nn.functional.pad(values.double().square(), (0, -len(values) % step))
        groups[name] = energy.view(-1, step).sum(1).sqrt()
        price = prices[name]
        coarse[name] = Price(step * price.component, price.dense, price.fixed, step**2 * price.pivot)
    counts = allocate(groups, coarse, budget)
    return {name: min(step * count, len(sigma[name])) for name, count in counts.items()}
