"""How many ranks every matrix keeps: one rank, a share of the ranks, a density, or a budget over all matrices.

A matrix that a factorization would not make smaller stays dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.families import find_sites

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

Allocation = Literal["uniform", "global"]
Shape = tuple[int, int]  # out, in


@dataclass(frozen=True)
class RankRule:
    """What decides the ranks: ``rank`` if it is set, else ``rank_ratio``, else ``density``.

    Attributes:
        density: every matrix keeps this fraction of its parameters, rounded down; 1.0 keeps all dense.
        rank: every matrix gets this rank.
        rank_ratio: every matrix keeps this fraction of its ranks, floor(ratio * min(out, in)) (FWSVD: 0.33).
        allocation: ``uniform`` as above; ``global`` gives the same number of parameters in all to the components
            with the most energy (squared singular value) per parameter, wherever they are.
    """

    density: float = 1.0
    rank: int | None = None
    rank_ratio: float | None = None
    allocation: Allocation = "uniform"

    @property
    def by_density(self) -> bool:
        """Whether the density is what decides."""
        return self.rank is None and self.rank_ratio is None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be factorized."""
        return self.density == 1 if self.by_density else self.rank is None and self.rank_ratio == 1

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank or a ratio that makes no matrix of ``net`` smaller; its values are not needed."""
        replace(self, allocation="uniform").allocate(net)

    def allocate(self, net: PreTrainedModel, sigma: Callable[[str, Tensor], Tensor] | None = None) -> dict[str, int]:
        """Return {site: rank} of the Linears to factorize.

        Args:
            net: the dense net.
            sigma: (site, weight) -> its singular values, falling, on one scale for all sites; for ``global``.

        Raises:
            UserError: the rank or the ratio saves nothing in any matrix.
        """
        if self.keeps_all:
            return {}
        weights: dict[str, Any] = {site.name: net.get_submodule(site.name).weight for site in find_sites(net)}
        shapes: dict[str, Shape] = {name: tuple(weight.shape) for name, weight in weights.items()}
        ranks = {name: self._uniform(*shape) for name, shape in shapes.items()}
        kept = {name: rank for name, rank in ranks.items() if rank <= largest_rank(*shapes[name])}
        if not kept and not self.by_density:
            what, value = ("rank", self.rank) if self.rank is not None else ("rank_ratio", self.rank_ratio)
            limit = max(largest_rank(*shape) for shape in shapes.values())
            raise UserError(f"model.{what}: {value} makes no matrix smaller; the largest rank that does is {limit}")
        if self.allocation == "uniform":
            return kept
        assert sigma is not None
        budget = sum(stored(*shape, ranks[name]) for name, shape in shapes.items())
        return allocate_globally({name: sigma(name, weight) for name, weight in weights.items()}, shapes, budget)

    def _uniform(self, out: int, inner: int) -> int:
        if self.rank is not None:
            return self.rank
        if self.rank_ratio is not None:
            return rank_for_ratio(self.rank_ratio, out, inner)
        return rank_for_density(self.density, out, inner)


def break_even_rank(out_features: int, in_features: int) -> float:
    """out * in / (out + in): a factorization pays only below this rank (384 for 768 x 768)."""
    return out_features * in_features / (out_features + in_features)


def rank_for_density(density: float, out_features: int, in_features: int) -> int:
    """Largest rank with at most ``density`` of the parameters; at least 1.

    floor(density * out * in / (out + in)), the rule of SVD-LLM.

    Raises:
        UserError: ``density`` is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:
        raise UserError(f"density {density} is not a kept fraction; valid: above 0, at most 1")
    rank = density * break_even_rank(out_features, in_features)
    return max(1, floor(rank + 1e-9))  # a density made from a rank gives that rank back


def rank_for_ratio(rank_ratio: float, out_features: int, in_features: int) -> int:
    """floor(rank_ratio * min(out, in)), at least 1; the rule of FWSVD: 0.33 of 768 is 253.

    Raises:
        UserError: ``rank_ratio`` is not in (0, 1].
    """
    if not 0.0 < rank_ratio <= 1.0:
        raise UserError(f"rank_ratio {rank_ratio} is not a fraction of the full rank; valid: above 0, at most 1")
    return max(1, floor(rank_ratio * min(out_features, in_features) + 1e-9))


def largest_rank(out: int, inner: int) -> int:
    """Return the largest rank whose factors have fewer parameters than out x inner."""
    return ceil(out * inner / (out + inner)) - 1


def stored(out: int, inner: int, rank: int) -> int:
    """Return the parameters of an out x inner matrix at ``rank``; dense where factors would not be smaller."""
    return min(rank * (out + inner), out * inner)


def allocate_globally(sigma: dict[str, Tensor], shapes: dict[str, Shape], parameters: int) -> dict[str, int]:
    """Spend ``parameters`` on the components with the most energy per parameter.

    The j-th component of a matrix is worth sigma_j ** 2 and costs out + in. One threshold on worth / cost holds
    for all matrices; sigma falls, so each keeps a prefix. Every matrix keeps at least one component. With the
    singular values of a Fisher-weighted matrix the sum of what is dropped is the second-order estimate of the
    loss it costs.

    Args:
        sigma: singular values by matrix, falling.
        shapes: (out, in) by matrix.
        parameters: not exceeded, unless one component each is more.

    Returns:
        rank by matrix; a matrix whose factors would not be smaller is left out and stays dense.
    """
    worth = {name: values.double() ** 2 / sum(shapes[name]) for name, values in sigma.items()}
    thresholds = torch.cat(list(worth.values())).sort(descending=True).values

    def ranks(threshold: Tensor) -> dict[str, int]:
        return {name: max(1, int((values >= threshold).sum())) for name, values in worth.items()}

    def size(chosen: dict[str, int]) -> int:
        return sum(stored(*shapes[name], rank) for name, rank in chosen.items())

    low, high = 0, len(thresholds)  # thresholds[low] is affordable, thresholds[high] is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(ranks(thresholds[middle])) <= parameters else (low, middle)
    chosen = ranks(thresholds[low])
    return {name: rank for name, rank in chosen.items() if rank <= largest_rank(*shapes[name])}
