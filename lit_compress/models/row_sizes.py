"""The weights that an export stores if only some rows of the matrices are kept, for rankings of rows.

A neuron whose rows are all removed goes with the column that reads it, a head without values with all of its rows and
columns (cut.py). So a row has no price of its own, but the stored weights of the best n rows have a closed
form. A weight of a matrix is stored from the moment on at which both its row and its column are, so they are, over all
matrices, the sum of (rows stored so far) x (columns stored so far).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lit_compress.models.record import join_parts, parts_of, split_parts
from lit_compress.models.sites import Model, SubLayer, cuttable, of_kind, site_shapes


class _Matrix(NamedTuple):
    """A matrix: its rows in the ranking, its size (rows, columns), and the rank of its factors."""

    rows: slice
    size: tuple[int, int]
    rank: int


class RowSizes:
    """Count the weights that are stored for kept rows of all sites, and choose rows within a budget.

    Rows are numbered through all sites, in the order of :func:`~lit_compress.models.sites.find_sites`.

    Args:
        net: with all rows.
        ranks: of the factors by site, which are stored in any case and keep heads and neurons; {} for rows alone.
        biases_go: a removed row loses its bias too, so a gated neuron is nothing without one of its two rows.
    """

    def __init__(self, net: Model, ranks: Mapping[str, int] = {}, biases_go: bool = False) -> None:
        self.matrices, self.rows = dict[str, _Matrix](), 0
        for name, (out, inner) in site_shapes(net).items():
            self.matrices[name] = _Matrix(slice(self.rows, self.rows + out), (out, inner), ranks.get(name, 0))
            self.rows += out
        self.total = sum(prod(matrix.size) for matrix in self.matrices.values())
        self._parts = [] if any(ranks.values()) else cuttable(net)
        self._together = {
            part.last: biases_go or not any(getattr(net.get_submodule(name), "bias", None) is not None
                                            for role, name in part.sites.items() if role != "down")
            for part in self._parts if part.kind == "ffn"
        }  # fmt: skip

    def along(self, order: Tensor) -> Tensor:
        """Return the weights that the first, the first two, ... of the rows ``order`` store: int64 [rows], as it.

        A row of a removed head counts for nothing until the head has values.
        """
        counted, columns = _places(order), dict[str, Tensor]()
        for part in self._parts:
            columns[part.last] = (self._heads if part.kind == "attention" else self._neurons)(part, counted)
        stored = torch.zeros_like(order)
        for name, matrix in self.matrices.items():
            rows = _so_far(counted[matrix.rows], self.rows)
            kept = rows * (_so_far(columns[name], self.rows) if name in columns else matrix.size[1])
            if rank := matrix.rank:
                kept = (rank * sum(matrix.size) + kept).clamp(max=prod(matrix.size))
            stored += kept
        return stored

    def _firsts(self, part: SubLayer) -> dict[str, slice]:
        """Return role -> rows of the matrices that read the stream, in forward order."""
        return {role: self.matrices[name].rows for role, name in part.sites.items() if name != part.last}

    def _neurons(self, part: SubLayer, counted: Tensor) -> Tensor:
        """Return when the columns of the last matrix come; rows of a neuron that is not there do not count."""
        rows = self._firsts(part)
        firsts = torch.cat([counted[own] for own in rows.values()])
        firsts = firsts.view(sum(len(parts_of(role)) for role in rows), -1)
        if len(firsts) == 1 or not self._together[part.last]:
            return firsts.amin(0)
        neurons = firsts.amax(0)
        for role, own in rows.items():
            counted[own] = neurons.repeat(len(parts_of(role)))
        return neurons

    def _heads(self, part: SubLayer, counted: Tensor) -> Tensor:
        """Return when the columns of the last matrix come, with their head; the head's other rows come then too."""
        heads = self._values(part, counted).amin(1)
        queries = self.matrices[part.last].size[1] // (len(heads) * part.width)
        for role, rows in self._firsts(part).items():
            each = heads.repeat_interleave((queries if role == "q" else 1) * part.width)
            counted[rows] = torch.maximum(counted[rows], join_parts(role, [each] * len(parts_of(role)), part.width))
        return heads.repeat_interleave(queries * part.width)

    def _values(self, part: SubLayer, of_rows: Tensor) -> Tensor:
        """Return what belongs to the rows of the values of each head, [heads, width]."""
        rows = self.matrices[part.sites[part.values]].rows
        return split_parts(part.values, of_rows[rows], part.width)[-1].view(-1, part.width)

    @torch.no_grad()
    def choose(self, scores: Tensor, budget: int | Tensor) -> Tensor:
        """Return the rows to keep, those with the largest scores [rows] whose stored weights fit ``budget``: bool.

        A head that does not fit as it comes is passed over, so that what is left of the budget is less than a row
        and a column; of equal scores the first is kept.
        """
        order = scores.argsort(descending=True, stable=True)
        places = _places(order)
        fits = self.along(order) <= budget
        if attentions := of_kind(self._parts, "attention"):
            number = fits.sum()
            late = torch.zeros_like(scores, dtype=torch.bool)
            for part in attentions:
                gone = (self._values(part, places) >= number).all(1).repeat_interleave(part.width)
                each = [torch.zeros_like(gone)] * (len(parts_of(part.values)) - 1) + [gone]
                late[self.matrices[part.sites[part.values]].rows] = join_parts(part.values, each, part.width)
            order = (places + late * self.rows).argsort()
            places = _places(order)
            fits = (self.along(order) <= budget) & ~late[order]
        return fits[places]

    def stored(self, keep: Tensor) -> Tensor:
        """Return the weights that are stored for the rows ``keep``, bool [rows]; 0-dim."""
        if not keep.any():
            return keep.new_full((), sum(m.rank * sum(m.size) for m in self.matrices.values()), dtype=torch.int64)
        order = keep.int().argsort(descending=True, stable=True)
        return self.along(order)[keep.sum() - 1]


def _places(order: Tensor) -> Tensor:
    """Return the place of every row in ``order``."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _so_far(places: Tensor, number: int) -> Tensor:
    """Return how many of ``places`` are 0, at most 1, ...: int64 [number]."""
    counts = torch.zeros(number, dtype=torch.int64, device=places.device)
    return counts.index_add_(0, places, torch.ones_like(places)).cumsum(0)
