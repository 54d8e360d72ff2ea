"""The rule for the ranks of a net's matrices: one rank, a share of the ranks, a density, or one budget for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lit_compress.models.accounting import count_params, dense_layers, stored_density, whole_density
from lit_compress.models.sites import find_sites, stacks, token_table
from lit_compress.models.surgery import stacked_weight
from lit_compress.numerics.ranks import (
    Price,
    Shape,
    allocate_globally,
    largest_rank,
    rank_for_density,
    rank_for_ratio,
    stored,
)
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel


Allocation = Literal["uniform", "global"]
Scope = Literal["blocks", "all"]


@dataclass(frozen=True)
class RankRule:
    """The rule for the ranks: by ``rank`` if it is set, else by ``rank_ratio``, else by ``density``.

    Attributes:
        density: every matrix keeps this fraction of its parameters, rounded down; 1.0 keeps all dense.
        rank: every matrix gets this rank.
        rank_ratio: every matrix keeps this fraction of its ranks, floor(ratio * min(out, in)) (FWSVD: 0.33).
        allocation: ``uniform`` as above; ``global`` gives the same number of parameters in all to the components
            with the most energy (squared singular value) per parameter, wherever they are.
        stacked: matrices that read the same input count as one, the rows of all, with one rank.
        scope: ``blocks``: the density is that of the matrices of the transformer blocks. ``all``: it is that of all
            weights of the net, and the table of token embeddings is factorized with the matrices.
    """

    density: float = 1.0
    rank: int | None = None
    rank_ratio: float | None = None
    allocation: Allocation = "uniform"
    stacked: bool = False
    scope: Scope = "blocks"

    def __post_init__(self) -> None:
        require(self, "model.rank", low=1)
        require(self, "model.rank_ratio", above=0, high=1)
        if self.scope == "all" and not self.by_density:
            raise UserError("model.scope: 'all' needs a density, of the whole net; give model.density")
        if self.scope == "all" and self.allocation != "global":
            raise UserError(f"model.scope: 'all' needs one budget for all; model.allocation is '{self.allocation}', "
                            "nearest: global")  # fmt: skip

    @property
    def by_density(self) -> bool:
        """Whether the ranks follow from the density."""
        return self.rank is None and self.rank_ratio is None

    @property
    def keeps_all(self) -> bool:
        """Whether no matrix is factorized."""
        return self.density == 1 if self.by_density else self.rank is None and self.rank_ratio == 1

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a rank or a ratio that makes no matrix of ``net`` smaller; only shapes are read.

        With scope ``all`` also refuse a table that is no matrix of its own, and a density that leaves too little.

        Raises:
            UserError: as said.
        """
        replace(self, allocation="uniform", scope="blocks").allocate(net)
        if self.scope == "all" and not self.keeps_all:
            if token_table(net) is None:
                raise UserError(
                    f"model.scope: the token embeddings of '{net.config.model_type}' have other uses, too (an output "
                    "layer); nearest: blocks"
                )
            prices, total = self.prices(net).values(), count_params(net).total
            least = (total - sum(price.dense - price.component for price in prices)) / total
            if self.density < least:
                raise UserError(
                    f"model.density: {self.density} of the whole net cannot be reached with scope all; what is not "
                    f"factorized and one component of each matrix are {least + 5e-4:.3f}"
                )

    def allocate(self, net: PreTrainedModel, sigma: Callable[[str, Tensor], Tensor] | None = None) -> dict[str, int]:
        """Return {site: rank} of the Linears to factorize; a stack is called by its first site.

        Args:
            net: the dense net.
            sigma: function of site and weight that returns singular values, falling, on one scale for all sites; for
                ``global``. For a stack it gets the rows of all matrices.

        Raises:
            UserError: the rank or the ratio makes no matrix smaller.
        """
        if self.keeps_all:
            return {}
        members = self._members(net)
        shapes = _shapes({name: net.get_submodule(name) for names in members.values() for name in names}, members)
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
        whole = sum(out * inner for out, inner in shapes.values())
        if self.scope == "all":
            budget = floor(self.density * (total := count_params(net).total)) - (total - whole)
        elif self.by_density:
            budget = floor(self.density * whole)
        return allocate_globally(self.sigmas(net, sigma), shapes, budget)

    def sigmas(self, net: PreTrainedModel, sigma: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the singular values of every matrix or stack, by ``sigma`` as for :meth:`allocate`."""
        members = self._members(net)
        todo = track(members.items(), "decompose", len(members))
        return {name: sigma(name, stacked_weight(net, names)) for name, names in todo}

    def prices(self, net: PreTrainedModel) -> dict[str, Price]:
        """Return what every matrix or stack costs, in parameters."""
        members = self._members(net)
        shapes = _shapes({name: net.get_submodule(name) for names in members.values() for name in names}, members)
        return {name: Price(sum(shape), shape[0] * shape[1]) for name, shape in shapes.items()}

    def density_of(self, net: PreTrainedModel) -> float:
        """Return the density that these ranks leave; ``density`` itself where the ranks follow from it.

        It is that of the scope: of the blocks' matrices, or of all weights.

        Args:
            net: dense or factorized; only shapes are read.
        """
        if self.by_density:
            return self.density
        layers = dense_layers(net)
        shapes = _shapes(layers, self._members(net) if self.stacked else {name: (name,) for name in layers}).values()
        left = sum(stored(*shape, self._uniform(*shape)) for shape in shapes)
        return left / sum(out * inner for out, inner in shapes)

    def left_of(self, net: PreTrainedModel) -> float:
        """Return the density of ``net`` as it is, in this rule's scope."""
        return whole_density(net) if self.scope == "all" else stored_density(net)

    def table(self, net: PreTrainedModel) -> str | None:
        """Return the name of the table that is factorized with the matrices; None without one."""
        return token_table(net) if self.scope == "all" else None

    def stacks(self, net: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """Return {first site: names of all} of the matrices that get one right factor; {} if they are not stacked."""
        return stacks(net) if self.stacked else {}

    def _members(self, net: PreTrainedModel) -> dict[str, tuple[str, ...]]:
        """Return {name: sites} in forward order: the table, stacks, and every other site by itself."""
        stacked = self.stacks(net)
        inside = {name for names in stacked.values() for name in names[1:]}
        names = [*filter(None, [self.table(net)]), *(s.name for s in find_sites(net))]
        return {name: stacked.get(name, (name,)) for name in names if name not in inside}

    def _uniform(self, out: int, inner: int) -> int:
        if self.rank is not None:
            return self.rank
        if self.rank_ratio is not None:
            return rank_for_ratio(self.rank_ratio, out, inner)
        return rank_for_density(self.density, out, inner)


def _shapes(layers: Mapping[str, Any], members: Mapping[str, tuple[str, ...]]) -> dict[str, Shape]:
    """Return (out of all sites, in) by name of ``members``; a table reads as many inputs as it has rows."""
    return {
        name: (layers[name].embedding_dim, layers[name].num_embeddings)
        if hasattr(layers[name], "num_embeddings")
        else (sum(layers[site].out_features for site in sites), layers[name].in_features)
        for name, sites in members.items()
    }


def choose_rule(default: Mapping[str, float], allocation: Allocation = "uniform", **given: float | None) -> RankRule:
    """Return the rule of the one of ``density``, ``rank`` and ``rank_ratio`` that is given, else of ``default``.

    Raises:
        UserError: several values are given.

    >>> choose_rule({"density": 0.25}, density=None, rank=30).rank
    30
    """
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        names = ", ".join(f"model.{name} {value}" for name, value in chosen.items())
        raise UserError(f"{names}: only one of them can decide the ranks; set the others to null")
    return RankRule(allocation=allocation, **chosen or default)
