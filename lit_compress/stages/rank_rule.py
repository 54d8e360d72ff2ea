"""The rule for the ranks of a model's matrices: one rank, a share of the ranks, a density, or one budget for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor
from typing import Literal

import torch
from torch import Tensor

from lit_compress.models.sites import Model, site_shapes, stacks
from lit_compress.numerics.ranks import Shape, allocate, largest_rank, rank_for_density, rank_for_ratio, rounded, stored
from lit_compress.utils.errors import UserError, require

Allocation = Literal["uniform", "global"]


@dataclass(frozen=True)
class RankRule:
    """The rule for the ranks: by ``rank`` if it is set, else by ``rank_ratio``, else by ``density``.

    Attributes:
        density: every matrix keeps this fraction of its parameters, rounded down; 1.0 keeps all dense.
        rank: every matrix gets this rank.
        rank_ratio: every matrix keeps this fraction of its ranks, floor(ratio * min(out, in)) (FWSVD: 0.33).
        allocation: ``uniform`` as above; ``global`` gives as many parameters in all to the components with the most
            energy (squared singular value) per parameter, wherever they are.
        stacked: matrices that read the same input count as one, the rows of all, with one rank.
        fill: with ``uniform``: one more rank each for the first matrices, of what rounding down leaves: a budget is met
            so.
        round_to: ranks are multiples of it: rounded down, and the rest is spent in such steps, on the first matrices
            (``uniform``) or by worth (``global``). A rank below it stays.
        uniform: where heads and neurons go in place of ranks, every layer keeps as many.
    """

    density: float = 1.0
    rank: int | None = None
    rank_ratio: float | None = None
    allocation: Allocation = "uniform"
    stacked: bool = False
    fill: bool = False
    round_to: int = 1
    uniform: bool = False

    def __post_init__(self) -> None:
        require(self, "model.rank", low=1)
        require(self, "model.round_to", low=1)
        require(self, "model.rank_ratio", above=0, high=1)

    @property
    def by_density(self) -> bool:
        """Whether the ranks follow from the density."""
        return self.rank is None and self.rank_ratio is None

    @property
    def keeps_all(self) -> bool:
        """Whether no matrix is factorized."""
        return self.density == 1 if self.by_density else self.rank is None and self.rank_ratio == 1

    def allocate(self, net: Model, sigma: Callable[[str], Tensor] | None = None) -> dict[str, int]:
        """Return {site: rank} of the Linears of the dense ``net`` to factorize; a stack is called by its first site.

        ``sigma``, for ``global``, gives the singular values of a site or stack, falling, on one scale for all. None:
        all matrices matter alike; only shapes are read.

        Raises:
            UserError: the rank or the ratio makes no matrix smaller, or the budget is below one component of each.
        """
        if self.keeps_all:
            return {}
        sizes = site_shapes(net)
        shapes = {n: (sum(sizes[s][0] for s in sites), sizes[n][1]) for n, sites in self.members(net).items()}
        ranks = {name: self._uniform(*shape) for name, shape in shapes.items()}
        kept = {name: rank for name, rank in ranks.items() if rank <= largest_rank(*shapes[name])}
        if not kept and not self.by_density:
            what, value = ("rank", self.rank) if self.rank is not None else ("rank_ratio", self.rank_ratio)
            limit = max(largest_rank(*shape) for shape in shapes.values())
            raise UserError(f"model.{what}: {value} makes no matrix smaller; the largest rank that does is {limit}")
        budget: float = sum(stored(*shape, ranks[name]) for name, shape in shapes.items())
        if self.by_density:
            whole, step = sum(out * inner for out, inner in shapes.values()), self.round_to
            least = sum(stored(*shape, step if self.allocation == "global" else 1) for shape in shapes.values())
            if self.density * whole < least:
                raise below_one_rank(self.density, least / whole)
            budget = floor(self.density * whole)
        if self.allocation == "uniform":
            return self._filled(kept, shapes) if (self.fill or self.round_to > 1) and self.by_density else kept
        chosen = allocate(
            {name: _even(i / len(shapes), *shape) if sigma is None else sigma(name)
             for i, (name, shape) in enumerate(shapes.items())},
            shapes, budget, self.round_to,
        )  # fmt: skip
        return {name: rounded(min(rank, largest_rank(*shapes[name])), self.round_to) for name, rank in chosen.items()}

    def _filled(self, ranks: dict[str, int], shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return the ranks with one step more in matrices from the first on, while the density is not exceeded."""
        whole = sum(out * inner for out, inner in shapes.values())
        left = floor(self.density * whole + 1e-6) - sum(
            stored(*shapes[n], ranks.get(n, max(shapes[n]))) for n in shapes
        )
        filled = dict(ranks)
        for name, rank in ranks.items():
            step = self.round_to if rank >= self.round_to else self.round_to - rank
            more = stored(*shapes[name], rank + step) - stored(*shapes[name], rank)
            if rank + step <= largest_rank(*shapes[name]) and more <= left:
                filled[name], left = rank + step, left - more
        return filled

    def density_of(self, net: Model) -> float:
        """Return the density that these ranks leave of ``net``, dense or factorized; ``density`` if it gives them."""
        if self.by_density:
            return self.density
        shapes = list(site_shapes(net).values())
        left = sum(stored(*shape, self._uniform(*shape)) for shape in shapes)
        return left / sum(out * inner for out, inner in shapes)

    def stacks(self, net: Model) -> dict[str, tuple[str, ...]]:
        """Return {first site: names of all} of the matrices that get one right factor; {} if they are not stacked."""
        return stacks(net) if self.stacked else {}

    def members(self, net: Model) -> dict[str, tuple[str, ...]]:
        """Return {name: sites} in forward order: stacks, and every other site by itself."""
        stacked = self.stacks(net)
        inside = {name for names in stacked.values() for name in names[1:]}
        return {name: stacked.get(name, (name,)) for name in site_shapes(net) if name not in inside}

    def _uniform(self, out: int, inner: int) -> int:
        if self.rank is not None:
            return rounded(self.rank, self.round_to)
        if self.rank_ratio is not None:
            return rounded(rank_for_ratio(self.rank_ratio, out, inner), self.round_to)
        return rounded(rank_for_density(self.density, out, inner), self.round_to)


def below_one_rank(density: float, least: float) -> UserError:
    """Return the line for a ``density`` below the ``least`` one, at which every matrix has one rank, or one step."""
    return UserError(
        f"model.density: {density:g} is less than one rank of every matrix; nearest valid value {least + 5e-5:.4f}"
    )


def _even(place: float, out: int, inner: int) -> Tensor:
    """Return singular values with which matrices matter alike; in ``place``, no two components are worth the same."""
    most = min(out, inner)
    return ((out + inner) * (1 - (torch.arange(most, dtype=torch.float64) + place) / most)).sqrt()
