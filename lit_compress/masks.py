"""Scores + budget -> which weights stay: exact selection over many tensors, without a sort or a gather.

The hot path of pruning is :func:`apply_threshold_`, one compare-and-multiply per step. Every few steps the
threshold moves: :func:`kth_largest` finds it, :func:`break_ties_` makes it cut where it was asked to.
Both work on shards: ``reduce`` is then an in-place all-reduce (SUM) of an int64 tensor over the ranks that
hold different parts. Replicas (DDP) hold the same scores and must not pass one.

Scores are float32 and hold no NaN; -inf marks "never".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.tensors import local

Scope = Literal["global", "matrix"]
Reduce = Callable[[Tensor], object]

_BINS = 1 << 16
_CHUNK, _CHUNK_CPU = 1 << 26, 1 << 18  # elements; on a CPU, what stays in a core's cache


def keep_count(density: float, total: int) -> int:
    """Elements to keep, floor(density * total + 1/2).

    Raises:
        UserError: ``density`` is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:
        raise UserError(f"density {density} is not a kept fraction; valid: above 0, at most 1")
    return math.floor(density * total + 0.5)


@torch.no_grad()
def kth_largest(scores: Sequence[Tensor], keep: int, reduce: Reduce | None = None) -> Tensor:
    """The ``keep``-th largest of all elements of all tensors; exactly ``sort(descending)[keep - 1]``.

    Radix selection on the order-preserving integer image of float32: a histogram of the upper 16 bits finds
    the bin the element is in, a histogram of the lower 16 bits of that bin's members finds the element.

    Args:
        scores: float32, any shapes, empty shards included; DTensors are read locally.
        keep: how many elements are to be at least as large; +inf is returned for 0, the minimum for
            anything from the number of elements up.
        reduce: all-reduce of the histograms, int64 [65536]; see the top of the module.

    Returns:
        0-dim float32 on the scores' device, the same on every rank. Zero comes back as +0.0.
    """
    shards = [local(score) for score in scores]
    device = shards[0].device
    if keep <= 0:
        return torch.full((), math.inf, device=device)

    upper = torch.zeros(_BINS, dtype=torch.int64, device=device)
    for key in _keys(shards):
        upper += torch.bincount((key >> 16).add_(_BINS // 2), minlength=_BINS)
    if reduce is not None:
        reduce(upper)
    high, rest = _find(upper, torch.full((), keep, dtype=torch.int64, device=device))
    high -= _BINS // 2

    lower = torch.zeros(_BINS, dtype=torch.int64, device=device)
    for key in _keys(shards):
        lower += torch.bincount(key[(key >> 16) == high] & (_BINS - 1), minlength=_BINS)
    if reduce is not None:
        reduce(lower)
    low, _ = _find(lower, rest)

    return _image((high * _BINS + low).int()).view(torch.float32)


def _keys(shards: Sequence[Tensor]) -> Iterator[Tensor]:
    """int32 chunks whose signed order is the order of the floats; -0.0 and 0.0 are the same."""
    chunk_size = _CHUNK_CPU if shards[0].device.type == "cpu" else _CHUNK
    for shard in shards:
        assert shard.dtype == torch.float32, shard.dtype
        for chunk in torch.split(shard.reshape(-1), chunk_size):
            yield _image((chunk + 0.0).view(torch.int32))  # + 0.0: a copy, and -0.0 becomes 0.0


def _image(bits: Tensor) -> Tensor:
    """Flip the lower 31 bits of negative int32: float32 bits <-> monotone integers. Its own inverse."""
    return bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)


def _find(counts: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of the ``keep``-th element counted from the top, and its place among that bin's elements."""
    from_top = counts.flip(0).cumsum(0)
    keep = torch.minimum(keep, from_top[-1])
    index = torch.searchsorted(from_top, keep)
    above = from_top[index] - counts[_BINS - 1 - index]
    return _BINS - 1 - index, keep - above


@torch.no_grad()
def topk_masks(
    scores: Sequence[Tensor],
    keep: int | Sequence[int],
    scope: Scope = "global",
    reduce: Reduce | None = None,
    shard: tuple[int, int] = (0, 1),
) -> list[Tensor]:
    """Masks that keep exactly the largest ``keep`` elements; of equal ones, those that come first.

    "First" is the order of the tensors, then of the rows: with nothing but equal scores the *last* tensors
    lose everything, so let scores gather before pruning starts.

    Args:
        scores: float32, any shapes.
        keep: number of elements over all tensors (``global``), or one number per tensor (``matrix``).
        scope: let all tensors compete, or each within itself.
        reduce: see the top of the module.
        shard: (rank, ranks) among those ``reduce`` sums over, each holding a slice of the rows of every
            tensor; needed to share out ties between them.

    Returns:
        One bool tensor per score, True = keep, of its shape (for DTensors: of the local shard).
    """
    if scope == "matrix":
        assert not isinstance(keep, int), "one number per tensor"
        return [
            topk_masks([score], number, reduce=reduce, shard=shard)[0]
            for score, number in zip(scores, keep, strict=True)
        ]
    assert isinstance(keep, int), "one number for all tensors"
    threshold = kth_largest(scores, keep, reduce)
    shards = [local(score) for score in scores]
    quotas, _, _ = _share_ties(shards, threshold, keep, reduce, shard)
    masks = [score > threshold for score in shards]
    for score, mask, quota in zip(shards, masks, quotas, strict=True):
        mask[_ties(score, threshold, slice(quota))] = True
    return masks


@torch.no_grad()
def break_ties_(
    scores: Sequence[Tensor],
    threshold: Tensor,
    keep: int,
    tolerance: float = 0.001,
    reduce: Reduce | None = None,
    shard: tuple[int, int] = (0, 1),
) -> int:
    """Make ``score >= threshold`` true for exactly ``keep`` elements, by moving surplus ties just below it.

    Of the elements equal to the threshold the last ones in index order are lowered to the next smaller
    normal float32. So the hot path stays one comparison, and nothing but the scores has to be saved. Typical
    surplus: the exact zeros of weights that never had a gradient. Ties at -inf cannot be lowered.

    Args:
        scores: float32; changed in place.
        threshold: of :func:`kth_largest` for the same ``scores`` and ``keep``.
        keep: number of elements wanted.
        tolerance: a surplus up to this fraction of all elements is left alone; 0 for an exact count.
        reduce: see the top of the module.
        shard: see :func:`topk_masks`.

    Returns:
        The surplus that was found, in elements over all ranks.
    """
    shards = [local(score) for score in scores]
    quotas, surplus, total = _share_ties(shards, threshold, keep, reduce, shard)
    if surplus > tolerance * total:
        tiny = torch.finfo(torch.float32).tiny
        below = torch.nextafter(threshold, torch.full_like(threshold, -math.inf))
        below = torch.where(below.abs() < tiny, -tiny, below)  # a subnormal may be flushed to zero
        for score, quota in zip(shards, quotas, strict=True):
            score[_ties(score, threshold, slice(quota, None))] = below
    return surplus


def _share_ties(
    shards: Sequence[Tensor], threshold: Tensor, keep: int, reduce: Reduce | None, shard: tuple[int, int]
) -> tuple[list[int], int, int]:
    """How many ties each local tensor keeps; how many are too many; how many elements there are in all."""
    rank, ranks = shard
    ties = torch.zeros(len(shards), ranks, dtype=torch.int64, device=threshold.device)
    ties[:, rank] = torch.stack([(score == threshold).sum() for score in shards])
    above = torch.stack([(score > threshold).sum() for score in shards]).sum()
    total = torch.full_like(above, sum(score.numel() for score in shards))
    counts = torch.cat([torch.stack([above, total]), ties.flatten()])
    if reduce is not None:
        reduce(counts)
    above_all, total_all, *ties_all = counts.tolist()  # the only wait for the device
    quotas, left = [], keep - above_all
    for number in ties_all:
        quotas.append(max(0, min(left, number)))
        left -= number
    return quotas[rank::ranks], max(0, -left), total_all


def _ties(score: Tensor, threshold: Tensor, part: slice) -> tuple[Tensor, ...]:
    """Indices of a part of the elements equal to the threshold, in index order."""
    return tuple(index[part] for index in (score == threshold).nonzero(as_tuple=True))


@torch.no_grad()
def apply_threshold_(weights: Sequence[Tensor], scores: Sequence[Tensor], threshold: Tensor | Sequence[Tensor]) -> None:
    """Zero the weights whose score is below the threshold, in place (LPAF Sec. 2.2: "set W to zero").

    Element-wise: one bool mask of temporary memory, no wait for the device. It multiplies by the mask, which
    is several times faster than a masked fill (so a zero may be -0.0, and an inf or NaN weight stays NaN).

    Args:
        weights: any float dtype; changed in place.
        scores: float32, same shapes and sharding.
        threshold: 0-dim float32, or one per tensor (scope ``matrix``).
    """
    thresholds = [threshold] * len(weights) if isinstance(threshold, Tensor) else threshold
    for weight, score, limit in zip(weights, scores, thresholds, strict=True):
        local(weight).mul_(local(score) >= limit)


@torch.no_grad()
def select_rows(
    scores: Sequence[Tensor],
    costs: Sequence[int],
    budget: int,
    reduce: Reduce | None = None,
    shard: tuple[int, int] = (0, 1),
) -> list[Tensor]:
    """Choose the rows to keep: the best of all matrices together, as many as their parameters fit the budget.

    Rows are put in order of falling score, equal ones in order of tensors and rows, and the longest beginning
    whose parameters sum to at most ``budget`` stays (LoSparse Eq. 9, where a row of many inputs counts for
    more: "top p" of the parameters, as in the official code). Less than one row of the budget is left over.

    Args:
        scores: float32 [rows] per matrix; DTensors are read locally.
        costs: parameters of one row of each matrix.
        budget: parameters to keep over all matrices and ranks; 0 keeps nothing.
        reduce: see the top of the module; here also of float32 [rows of all ranks].
        shard: see :func:`topk_masks`.

    Returns:
        One bool tensor per matrix, True = keep, of the shape of its score (for DTensors: of the local shard).
    """
    shards, (rank, ranks) = [local(score) for score in scores], shard
    assert all(score.dtype == torch.float32 and score.ndim == 1 for score in shards)
    device = shards[0].device
    sizes = torch.zeros(len(shards), ranks, dtype=torch.int64)
    sizes[:, rank] = torch.tensor([len(score) for score in shards])
    if reduce is not None:
        sizes = sizes.to(device)
        reduce(sizes)
    starts = (sizes.flatten().cumsum(0).view_as(sizes) - sizes)[:, rank].tolist()
    places = [slice(start, start + len(score)) for start, score in zip(starts, shards, strict=True)]

    everything = torch.zeros(int(sizes.sum()), device=device)
    for place, score in zip(places, shards, strict=True):
        everything[place] = score
    if reduce is not None:
        reduce(everything)
    cost = torch.tensor(costs, device=device).repeat_interleave(sizes.sum(1).to(device))
    order = everything.argsort(descending=True, stable=True)
    keep = torch.empty_like(everything, dtype=torch.bool)
    keep[order] = cost[order].cumsum(0) <= budget
    return [keep[place] for place in places]


@torch.no_grad()
def rows_above(score: Tensor, threshold: float, least: int) -> Tensor:
    """Mask of the rows with sigmoid(score) above ``threshold``, and in any case of the ``least`` best rows.

    Args:
        score: [out], whole.
        threshold: in [0, 1).
        least: rows kept whatever their score; of equal ones, those that come first.

    Returns:
        bool [out], True = keep.
    """
    mask = score.sigmoid() > threshold
    mask[score.argsort(descending=True, stable=True)[:least]] = True
    return mask
