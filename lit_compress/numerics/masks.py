"""Selection of the weights and rows with the largest scores over many tensors: exact, without a sort or a gather.

Every step calls :func:`apply_threshold_`, one compare-and-multiply. Every few steps the threshold changes:
:func:`kth_largest` computes it, :func:`break_ties_` makes it keep exactly the wanted number.
Both work on shards: ``reduce`` is then an in-place all-reduce (SUM) of an int64 tensor over the ranks that
hold different parts. Replicas (DDP) hold the same scores and must not pass one.

Scores are float32 and hold no NaN; -inf marks weights that are never kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lit_compress.numerics.foreach import ELEMENTS, Reduce, constant, joined, together
from lit_compress.utils.sharding import local

Choose = Callable[[Tensor, int | Tensor], Tensor]

_BINS = 1 << 16
_CHUNK_CPU = 1 << 18  # elements that fit a core's cache


def keep_count(density: float, total: int) -> int:
    """Return the number of elements to keep, floor(density * total + 1/2), of a density in (0, 1]."""
    assert 0.0 < density <= 1.0, density
    return math.floor(density * total + 0.5)


@torch.no_grad()
def kth_largest(scores: Sequence[Tensor], keep: int, reduce: Reduce | None = None) -> Tensor:
    """Return the ``keep``-th largest of all elements of all tensors, 0-dim; exactly ``sort(descending)[keep - 1]``.

    Radix selection on the order-preserving integer image of float32: a histogram of the upper 16 bits gives the bin of
    the element, a histogram of the lower 16 bits of that bin's members gives the element. It is the same on every rank;
    zero comes back as +0.0.

    Args:
        scores: float32, any shapes, empty shards included; DTensors are read locally.
        keep: 0 returns +inf, the number of elements or more the minimum.
        reduce: all-reduce of the histograms, int64 [65536]; see the top of the module.
    """
    shards = [local(score) for score in scores]
    device = shards[0].device
    if keep <= 0:
        return torch.full((), math.inf, device=device)

    upper = torch.zeros(_BINS, dtype=torch.int64, device=device)
    for key in _keys(shards):
        _count_(upper, (key >> 16).add_(_BINS // 2))
    if reduce is not None:
        reduce(upper)
    high, rest = _find(upper, torch.full((), keep, dtype=torch.int64, device=device))
    high -= _BINS // 2

    lower = torch.zeros(_BINS + 1, dtype=torch.int64, device=device)  # the last one: of elements in other bins
    for key in _keys(shards):
        _count_(lower, torch.where((key >> 16) == high, key & (_BINS - 1), _BINS))
    lower = lower[:_BINS].contiguous()
    if reduce is not None:
        reduce(lower)
    low, _ = _find(lower, rest)

    return _image((high * _BINS + low).int()).view(torch.float32)


def _keys(shards: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield int32 chunks whose signed order is the order of the floats; -0.0 and 0.0 are the same."""
    assert all(shard.dtype == torch.float32 for shard in shards)
    for part in together(shards):
        flat = joined(shards[part])
        for chunk in flat.split(_CHUNK_CPU if flat.device.type == "cpu" else ELEMENTS):
            yield _image((chunk + 0.0).view(torch.int32))  # + 0.0: a copy, and -0.0 becomes 0.0


def _count_(counts: Tensor, numbers: Tensor) -> None:
    """Add to ``counts`` how often each number occurs, in place; accelerators wait in ``bincount``."""
    if counts.device.type == "cpu":
        counts += torch.bincount(numbers, minlength=len(counts))
    else:
        counts.index_add_(0, numbers, counts.new_ones(1).expand(len(numbers)))


def _image(bits: Tensor) -> Tensor:
    """Flip the lower 31 bits of negative int32: float32 bits <-> monotone integers. Its own inverse."""
    return bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)


def _find(counts: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin of the ``keep``-th element counted from the top, and its place among that bin's elements."""
    from_top = counts.flip(0).cumsum(0)
    keep = torch.minimum(keep, from_top[-1])
    place = torch.searchsorted(from_top, keep[None])
    above = from_top.gather(0, place) - counts.gather(0, _BINS - 1 - place)  # a 0-dim index would be read by the host
    return (_BINS - 1 - place)[0], (keep - above)[0]


@torch.no_grad()
def break_ties_(
    scores: Sequence[Tensor],
    threshold: Tensor,
    keep: int,
    tolerance: float = 0.001,
    reduce: Reduce | None = None,
    shard: tuple[int, int] = (0, 1),
) -> int:
    """Make ``score >= threshold`` true for exactly ``keep`` elements, in place; return the surplus over all ranks.

    Of the elements equal to the threshold the last ones in index order are lowered to the next smaller normal float32.
    So a step needs one comparison only, and nothing but the scores is saved. Typical ties are the exact zeros of
    weights that never had a gradient. Ties at -inf cannot be lowered. If all scores are equal the *last* tensors lose
    everything, so pruning should start after some steps of scoring.

    Args:
        scores: float32.
        threshold: from :func:`kth_largest` for the same ``scores`` and ``keep``.
        tolerance: a surplus up to this fraction of all elements is not changed; 0 for an exact count.
        reduce: see the top of the module.
        shard: (rank, ranks) among the processes that ``reduce`` sums over, each holding a slice of the rows of every
            tensor; needed to divide ties among them.
    """
    (rank, ranks), shards = shard, [local(score) for score in scores]
    ties = torch.zeros(len(shards), ranks, dtype=torch.int64, device=threshold.device)
    ties[:, rank] = torch.stack([(score == threshold).sum() for score in shards])
    above = torch.stack([(score > threshold).sum() for score in shards]).sum()
    counts = torch.stack([above, torch.full_like(above, sum(map(torch.numel, shards)))])
    counts = torch.cat([counts, ties.flatten()])
    if reduce is not None:
        reduce(counts)
    above_all, total, *ties_all = counts.tolist()  # the only wait for the device
    quotas, left = [], keep - above_all
    for number in ties_all:
        quotas.append(max(0, min(left, number)))
        left -= number
    surplus = max(0, -left)
    if surplus > tolerance * total:
        tiny = torch.finfo(torch.float32).tiny
        below = torch.nextafter(threshold, torch.full_like(threshold, -math.inf))
        below = torch.where(below.abs() < tiny, -tiny, below)  # a subnormal may be flushed to zero
        for score, quota in zip(shards, quotas[rank::ranks], strict=True):
            tied = score == threshold
            score.masked_fill_(tied & (tied.flatten().cumsum(0).view_as(tied) > quota), below)
    return surplus


@torch.no_grad()
def apply_threshold_(weights: Sequence[Tensor], scores: Sequence[Tensor], threshold: Tensor) -> None:
    """Zero the weights whose score is below the 0-dim threshold, in place (LPAF Sec. 2.2: "set W to zero").

    Element-wise, one bool mask of temporary memory, no wait for the device. It multiplies by the mask, which is several
    times faster than a masked fill (so a zero may be -0.0, and an inf or NaN weight stays NaN). Scores are float32,
    shaped and sharded as the weights.
    """
    shards = [local(score) for score in scores]
    for part in together(shards):
        those, sizes = [local(weight) for weight in weights[part]], [score.numel() for score in shards[part]]
        flat = joined(shards[part])
        # several are a copy, which becomes the mask; the product is one call only if both lists have one dtype
        keep = flat >= threshold if len(those) == 1 else flat.ge_(threshold).to(those[0].dtype)
        masks = [mask.view_as(weight) for mask, weight in zip(keep.split(sizes), those, strict=True)]
        torch._foreach_mul_(those, masks)


@torch.no_grad()
def select_rows(scores: Sequence[Tensor], costs: Sequence[int] | Choose, budget: int | Tensor) -> list[Tensor]:
    """Choose the rows with the largest scores, over all matrices, whose parameters together fit the budget.

    Rows are ordered by falling score, equal ones by tensor and row, and the first ones are kept, as long as their
    parameters sum to at most ``budget`` (LoSparse Eq. 9, where a row with more inputs counts for more: "top p" of the
    parameters, as in the official code).

    Args:
        scores: float32 [rows] per matrix, unsharded.
        costs: parameters of one row of each matrix; or a function of the scores of all rows and of the budget that
            returns which rows to keep, bool [rows], where a row's parameters depend on others (models/row_sizes.py).
        budget: parameters to keep over all matrices, also 0-dim on the scores' device.

    Returns:
        One bool tensor per matrix, True = keep, of the shape of its score.
    """
    assert all(score.dtype == torch.float32 and score.ndim == 1 for score in scores)
    everything, rows = joined(scores), tuple(map(len, scores))
    if callable(costs):
        keep = costs(everything, budget)
    else:
        device = everything.device
        cost = constant(tuple(costs), device).repeat_interleave(constant(rows, device), output_size=sum(rows))
        order = everything.argsort(descending=True, stable=True)
        keep = torch.empty_like(everything, dtype=torch.bool)
        keep[order] = cost[order].cumsum(0) <= budget
    return list(keep.split(rows))


@torch.no_grad()
def select_units(scores: Tensor, sizes: Sequence[int], added: Tensor, budget: int) -> Tensor:
    """Return the kept units, bool [units], as :func:`select_rows`; a unit's cost depends on its rank in its group.

    Args:
        scores: float32 [units], one group after the other.
        sizes: number of units of each group.
        added: int64 [units], not negative: cost of the best, second best, ... unit of each group.
        budget: largest sum of the costs; below 0 keeps nothing.
    """
    rows = constant(tuple(sizes), scores.device)
    group = torch.arange(len(rows), device=scores.device).repeat_interleave(rows, output_size=len(scores))
    order = scores.argsort(descending=True, stable=True)
    cost = torch.empty_like(added)
    cost[group[order].argsort(stable=True)] = added  # group by group the units' places, best first
    keep = torch.empty_like(scores, dtype=torch.bool)
    keep[order] = cost.cumsum(0) <= budget
    return keep


@torch.no_grad()
def keep_rows_(weights: Sequence[Tensor], keep: Sequence[Tensor]) -> None:
    """Zero the rows of ``weights`` [rows, columns] that are not in ``keep``, bool [rows] each; in place.

    Bits are multiplied, as integers, so that an inf or a NaN also becomes 0.
    """
    here = [local(weight) for weight in weights]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[here[0].element_size()]
    masks = joined(keep).to(bits).split([len(weight) for weight in here])
    torch._foreach_mul_([weight.view(bits) for weight in here], [mask[:, None] for mask in masks])
