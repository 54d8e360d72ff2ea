"""Costs of matrices at every rank, of heads and neurons: parameters or FLOPs; milliseconds of factors on this machine.

Times of a shape are measured once and kept in the cache, unless the machine was too busy for them to be trusted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.models.sites import SubLayer, size_at, tokens_read
from lit_compress.numerics.ranks import Price, Shape, largest_rank
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.files import write_json
from lit_compress.utils.timing import in_turns, is_steady, pinned, processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Unit = Literal["parameters", "flops"]
StackSize = tuple[tuple[int, ...], int]  # outs of the stacked matrices, in

REPEATS = 40  # of every timing; the variants take turns
RANKS = (0.25, 0.5, 0.75, 1.0)  # shares of the largest rank that makes a matrix smaller, at which factors are timed


def prices_of(shapes: Mapping[str, StackSize], tokens: Mapping[str, int], unit: Unit) -> dict[str, Price]:
    """Return the price of every matrix or stack.

    Args:
        shapes: by name.
        tokens: how many tokens each reads in a forward.
        unit: what is counted. ``flops``: 2 per multiply-add.
    """
    each = {name: 1 if unit == "parameters" else 2 * tokens[name] for name in shapes}
    return {
        name: Price(each[name] * (sum(outs) + inner), each[name] * sum(outs) * inner)
        for name, (outs, inner) in shapes.items()
    }


@lru_cache(maxsize=256)
def measured(outs: tuple[int, ...], inner: int, tokens: int) -> Price:
    """Time dense matrices and factors of several ranks in turns, and lay a line through the times of the factors.

    Args:
        outs: outputs of each of the matrices that read the same input; they share the right factor.
        inner: inputs.
        tokens: rows of the input.

    Returns:
        In milliseconds of one thread.
    """
    most = max(1, largest_rank(sum(outs), inner))
    ranks = sorted({max(1, round(share * most)) for share in RANKS})
    x, dense = torch.randn(tokens, inner), [torch.randn(out, inner) for out in outs]
    factors = {rank: (torch.randn(rank, inner), [torch.randn(out, rank) for out in outs]) for rank in ranks}

    def factorized(right: Tensor, left: Sequence[Tensor]) -> None:
        narrow = F.linear(x, right)
        for matrix in left:
            F.linear(narrow, matrix)

    variants: list[Callable[[], object]] = [lambda: [F.linear(x, matrix) for matrix in dense]]
    variants += [partial(factorized, *pair) for pair in factors.values()]
    whole, *times = timed(variants, ("factors", outs, inner, tokens, ranks))
    return line(ranks, times, whole)


def line(ranks: Sequence[int], times: Sequence[float], dense: float) -> Price:
    """Return the price whose line over the ranks is closest to ``times`` (least squares), rising and not negative."""
    n, x, y = len(ranks), sum(ranks), sum(times)
    spread = n * sum(rank * rank for rank in ranks) - x * x
    slope = (n * sum(r * t for r, t in zip(ranks, times, strict=True)) - x * y) / spread if spread else 0.0
    slope = max(slope, 1e-3 * dense / max(ranks))  # noise may turn it round; more ranks are never cheaper
    return Price(slope, dense, max(0.0, (y - slope * x) / n))


def timed(variants: Sequence[Callable[[], object]], key: tuple[object, ...] | None = None) -> list[float]:
    """Return the median milliseconds of every function; they take turns, with one thread.

    Args:
        variants: the functions.
        key: of the times in the cache; with it, times measured before on this machine are reused.
    """
    folder = cache_folder() / f"times-{short_hash(processor(), torch.__version__, REPEATS, key)}"
    if key is not None and folder.is_dir():
        return json.loads((folder / "times.json").read_text())
    with pinned(1):
        rounds = in_turns(variants, REPEATS)
    times = [median(record) for record in rounds]
    if key is not None and all(map(is_steady, rounds)):
        build_once(folder, lambda temporary: write_json(temporary / "times.json", times))
    return times


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

    def at(self, unit: Unit, tokens: Mapping[str, int]) -> float:
        """Return the cost of one unit.

        Args:
            unit: what is counted.
            tokens: how many tokens each site reads.
        """
        if unit == "parameters":
            return self.weights
        return 2 * sum(out * inner * tokens[name] for name, (out, inner) in self.sizes.items()) // self.count


def unit_price(net: PreTrainedModel, part: SubLayer) -> UnitPrice:
    """Return the units of a sub-layer of the dense ``net``; only shapes are read."""
    sizes = {name: size_at(net, name) for name in part.sites.values()}
    return UnitPrice(part.heads if part.kind == "attention" else sizes[part.last][1], sizes)


def unit_prices(net: PreTrainedModel, parts: Sequence[SubLayer]) -> dict[str, UnitPrice]:
    """Return :func:`unit_price` of every sub-layer, by the matrix that reads its units."""
    return {part.last: unit_price(net, part) for part in parts}


@dataclass(frozen=True)
class FactorPrice:
    """A matrix that is stored as factors, or several on one right factor, and their cost in milliseconds.

    Attributes:
        names: of the sites.
        time: of the factors and the rows next to them.
        dense: of the matrices.
    """

    names: tuple[str, ...]
    time: float
    dense: float


def factor_prices(net: PreTrainedModel, length: int) -> list[FactorPrice]:
    """Return the measured prices of all matrices of ``net`` that are stored as factors or rows.

    Args:
        net: as exported; only shapes are read.
        length: tokens of the text.
    """
    products = []
    for names, outs, layer, tokens in _groups(net, length):
        if (rank := getattr(layer, "rank", None)) is not None:
            price = measured(outs, layer.in_features, tokens)
            rows = getattr(layer, "rows", 0) * layer.in_features / (layer.in_features + layer.out_features)
            products.append(FactorPrice(names, price.fixed + (rank + rows) * price.component, price.dense))
    return products


def _groups(net: PreTrainedModel, length: int) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Any, int]]:
    """Yield (names, outputs of each, first layer, tokens that it reads) of every matrix or stack on one factor."""
    read = tokens_read(net, length)
    stacked: dict[str, list[str]] = {}
    for name in read:
        first = getattr(net.get_submodule(name), "first", None)
        stacked.setdefault(first or name, []).append(name)
    for first, names in stacked.items():
        yield tuple(names), tuple(size_at(net, name)[0] for name in names), net.get_submodule(first), read[first]
