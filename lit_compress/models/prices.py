"""What matrices cost at every rank: parameters, FLOPs of a forward, or milliseconds measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.layers import LowRankEmbedding
from lit_compress.models.sites import tokens_read
from lit_compress.numerics.ranks import Price, largest_rank
from lit_compress.utils.timing import in_turns, pinned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Unit = Literal["parameters", "flops", "milliseconds"]
Shape = tuple[tuple[int, ...], int]  # outs of the stacked matrices, in

REPEATS = 40  # of every timing; the variants take turns
RANKS = (0.25, 0.5, 0.75, 1.0)  # shares of the largest rank that makes a matrix smaller, at which factors are timed


def prices_of(
    shapes: Mapping[str, Shape], tokens: Mapping[str, int], unit: Unit, pivot: bool = False
) -> dict[str, Price]:
    """Return the price of every matrix or stack.

    Args:
        shapes: by name.
        tokens: how many tokens each reads in a forward.
        unit: what is counted. ``flops``: 2 per multiply-add. ``milliseconds``: those of one thread, measured, of
            factors.
        pivot: factors are stored in pivot form.
    """
    if unit == "milliseconds":
        return {name: measured(outs, inner, tokens[name]) for name, (outs, inner) in shapes.items()}
    each = {name: 1 if unit == "parameters" else 2 * tokens[name] for name in shapes}
    return {
        name: Price(
            each[name] * (sum(outs) + inner), each[name] * sum(outs) * inner, pivot=each[name] if pivot else 0.0
        )
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
    variants += [lambda pair=pair: factorized(*pair) for pair in factors.values()]  # type: ignore[misc]
    whole, *times = timed(variants)
    return line(ranks, times, whole)


def line(ranks: Sequence[int], times: Sequence[float], dense: float) -> Price:
    """Return the price whose line over the ranks is closest to ``times`` (least squares), rising and not negative."""
    n, x, y = len(ranks), sum(ranks), sum(times)
    spread = n * sum(rank * rank for rank in ranks) - x * x
    slope = (n * sum(r * t for r, t in zip(ranks, times, strict=True)) - x * y) / spread if spread else 0.0
    slope = max(slope, 1e-3 * dense / max(ranks))  # noise may turn it round; more ranks are never cheaper
    return Price(slope, dense, max(0.0, (y - slope * x) / n))


def timed(variants: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median milliseconds of every function; they take turns, with one thread."""
    with pinned(1):
        return [median(times) for times in in_turns(variants, REPEATS)]


def unit_price(sizes: Sequence[tuple[int, int, int]], units: int, unit: Unit) -> float:
    """Return what one head or neuron costs in all matrices of its sub-layer.

    In milliseconds it is the difference of the matrices with all and with half of their units, per unit; the products
    of an attention's scores and values do not count.

    Args:
        sizes: (out, in, tokens read) of every matrix, with all units.
        units: their number; every matrix has outputs or inputs for each.
        unit: what is counted.
    """
    if unit == "milliseconds":
        return _measured_unit(tuple(sizes), units)
    return sum(out * inner * (1 if unit == "parameters" else 2 * tokens) for out, inner, tokens in sizes) // units


@lru_cache(maxsize=256)
def _measured_unit(sizes: tuple[tuple[int, int, int], ...], units: int) -> float:
    def products(share: int) -> Callable[[], object]:  # half of the inputs: as many as with half of the outputs
        pairs = [
            (torch.randn(tokens, inner // share), torch.randn(out, inner // share)) for out, inner, tokens in sizes
        ]
        return lambda: [F.linear(*pair) for pair in pairs]

    whole, half = timed([products(1), products(2)])
    return max(whole - half, 1e-3 * whole) / (units / 2)


def forward_price(net: PreTrainedModel, length: int) -> float:
    """Return the milliseconds of the matrices of ``net`` in a forward of one text, from measured prices of shapes.

    Added matrices on residual paths count, and the second factor of a table of embeddings; attention scores, norms and
    activations do not.

    Args:
        net: dense or as exported; only shapes are read.
        length: tokens of the text.
    """
    read = tokens_read(net, length)
    outs = {name: int(net.get_submodule(name).out_features) for name in read}  # type: ignore[arg-type]
    stacked: dict[str, list[str]] = {}
    for name in read:
        if (first := getattr(net.get_submodule(name), "first", None)) is not None:
            stacked.setdefault(first or name, []).append(name)
    total, inside = 0.0, {name for names in stacked.values() for name in names}
    for name, tokens in read.items():
        layer: Any = net.get_submodule(name)
        if name in inside and name not in stacked:
            continue
        group, rank = tuple(outs[n] for n in stacked.get(name, [name])), getattr(layer, "rank", None)
        if rank is None:
            total += measured(group, layer.in_features, tokens).dense if layer.in_features else 0.0
            continue
        price = measured(group, layer.in_features, tokens)
        rows = getattr(layer, "rows", 0) * layer.in_features / (layer.in_features + layer.out_features)
        total += price.fixed + (rank + rows) * price.component
    sites = [net.get_submodule(name) for name in read]
    for module in net.modules():
        if isinstance(module, LowRankEmbedding):
            total += measured((module.embedding_dim,), module.rank, length).dense
        elif hasattr(module, "counted_weights") and module not in sites:
            total += sum(measured((w.shape[0],), w.shape[1], length).dense for w in module.counted_weights())
    return total
