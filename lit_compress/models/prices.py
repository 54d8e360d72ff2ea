"""Parameters of matrices at every rank, of heads and neurons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_compress.models.sites import SubLayer, size_at
from lit_compress.numerics.ranks import Price, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

StackSize = tuple[tuple[int, ...], int]  # outs of the stacked matrices, in


def prices_of(shapes: Mapping[str, StackSize]) -> dict[str, Price]:
    """Return the price of every matrix or stack by name."""
    return {name: Price(sum(outs) + inner, sum(outs) * inner) for name, (outs, inner) in shapes.items()}


@dataclass(frozen=True)
class UnitPrice:
    """The heads of an attention or the neurons of a feed-forward network, and the cost of one of them.

    With grouped queries a unit is a head of keys and values with its queries.

    Attributes:
        count: number of units.
        sizes: site -> (out, in) of its matrix, which has outputs or inputs for each unit.
    """

    count: int
    sizes: Mapping[str, Shape]

    @property
    def whole(self) -> int:
        """Weights of all units of the sub-layer."""
        return sum(out * inner for out, inner in self.sizes.values())

    @property
    def weights(self) -> int:
        """Weights of one unit, in all matrices of the sub-layer."""
        return self.whole // self.count


def unit_price(net: PreTrainedModel, part: SubLayer) -> UnitPrice:
    """Return the units of a sub-layer of the dense ``net``; only shapes are read."""
    sizes = {name: size_at(net, name) for name in part.sites.values()}
    return UnitPrice(part.heads if part.kind == "attention" else sizes[part.last][1], sizes)


def unit_prices(net: PreTrainedModel, parts: Sequence[SubLayer]) -> dict[str, UnitPrice]:
    """Return :func:`unit_price` of every sub-layer, by the matrix that reads its units."""
    return {part.last: unit_price(net, part) for part in parts}
