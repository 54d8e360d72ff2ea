"""The rank of every matrix from a density, a rank ratio, or one budget for all matrices.

A matrix that a factorization would not make smaller stays dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor

import torch
from torch import Tensor

from lit_compress.numerics.search import largest

Shape = tuple[int, int]  # out, in


def break_even_rank(out_features: int, in_features: int) -> float:
    """Return out * in / (out + in), below which factors have fewer parameters than the matrix (384 for 768 x 768)."""
    return out_features * in_features / (out_features + in_features)


def rank_for_density(density: float, out_features: int, in_features: int) -> int:
    """Return the largest rank whose factors have at most ``density``, in (0, 1], of the parameters; at least 1.

    floor(density * out * in / (out + in)), the rule of SVD-LLM.
    """
    assert 0.0 < density <= 1.0, density
    rank = density * break_even_rank(out_features, in_features)
    return max(1, floor(rank + 1e-9))  # the density of a rank must return that rank


def rank_for_ratio(rank_ratio: float, out_features: int, in_features: int) -> int:
    """Return floor(rank_ratio * min(out, in)), at least 1, of a ratio in (0, 1]; FWSVD's rule: 0.33 of 768 is 253."""
    assert 0.0 < rank_ratio <= 1.0, rank_ratio
    return max(1, floor(rank_ratio * min(out_features, in_features) + 1e-9))


def largest_rank(out: int, inner: int) -> int:
    """Return the largest rank whose factors have fewer parameters than out x inner."""
    return ceil(out * inner / (out + inner)) - 1


def stored(out: int, inner: int, rank: int, rows: int = 0) -> int:
    """Return the stored parameters of an out x inner matrix at ``rank`` with ``rows`` next to it, at most dense."""
    return min(out * inner, rank * (out + inner) + rows * inner)


def rounded(number: int, multiple: int) -> int:
    """Return the largest multiple that is not above ``number``; a number below all of them stays unchanged.

    >>> rounded(93, 8), rounded(5, 8)
    (88, 5)
    """
    return number - number % multiple if number >= multiple else number


def allocate(sigma: Mapping[str, Tensor], shapes: Mapping[str, Shape], budget: float, step: int = 1) -> dict[str, int]:
    """Spend a budget of parameters on the components that are worth most for their price; return the rank by matrix.

    One threshold on sigma_j ** 2 / price holds for all matrices; sigma falls, so each keeps a prefix, of at least one
    component. With the singular values of a Fisher-weighted matrix the sum over dropped components is the second-order
    estimate of the loss it costs (second-order compression, section 3). A matrix whose factors would not be smaller is
    left out and stays dense.

    Args:
        sigma: singular values by matrix, falling.
        shapes: by matrix; matrices that are stacked on one right factor count as one.
        budget: not exceeded, unless one step each is more.
        step: ranks are multiples of it, except if a matrix has fewer components; so many components count as one.
    """
    worth = {}
    for name, values in sigma.items():
        energy = torch.nn.functional.pad(values.double().square(), (0, -len(values) % step))
        worth[name] = energy.view(-1, step).sum(1) / (step * sum(shapes[name]))
    thresholds = torch.cat(list(worth.values())).sort(descending=True).values
    thresholds = torch.cat([thresholds.new_full((1,), torch.inf), thresholds])  # at the first, one step each

    def steps(threshold: Tensor) -> dict[str, int]:
        return {name: max(1, int((values >= threshold).sum())) for name, values in worth.items()}

    def price(name: str, count: int) -> int:
        return stored(*shapes[name], step * count)

    def size(chosen: dict[str, int]) -> int:
        return sum(price(*pair) for pair in chosen.items())

    last = largest(lambda i: size(steps(thresholds[i])) <= budget, 0, len(thresholds) - 1)
    chosen = steps(thresholds[last])
    if last + 1 < len(thresholds):  # many components may be worth the same: those that are affordable are kept
        left = budget - size(chosen)
        for name, count in steps(thresholds[last + 1]).items():
            while chosen[name] < count and (more := price(name, chosen[name] + 1) - price(name, chosen[name])) <= left:
                chosen[name], left = chosen[name] + 1, left - more
    saving = [name for name, count in chosen.items() if step * count <= largest_rank(*shapes[name])]
    return {name: min(step * chosen[name], len(sigma[name])) for name in saving}
