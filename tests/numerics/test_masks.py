"""Exact selection, against sorting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_compress.numerics.masks import (
    apply_threshold_,
    break_ties_,
    keep_count,
    kth_largest,
    select_rows,
    select_units,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def awkward() -> list[Tensor]:
    """Negatives, both zeros, subnormals, the largest and smallest numbers, infinities, ties, an empty one."""
    return [
        draw(20, 7, seed=1),
        torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 3.4e38, -3.4e38, math.inf, -math.inf]),
        torch.zeros(3, 4),
        -torch.zeros(5),
        torch.full((6,), 0.25),
        torch.full((4,), -math.inf),
        torch.zeros(0, 8),
        draw(7, 9, seed=2).T,
        1.0 + torch.arange(40) * 2**-23,  # one bin of the upper 16 bits
    ]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def naive_masks(scores: list[Tensor], keep: int) -> list[Tensor]:
    """Sort by (score descending, flat index ascending); keep the first ones."""
    values = flat(scores).tolist()
    order = sorted(range(len(values)), key=lambda n: (-values[n], n))
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[torch.tensor(order[:keep], dtype=torch.int64)] = True
    parts = chosen.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


def lockstep_reduce(halves: list[list[Tensor]], work: object) -> list[object]:
    """Run ``work(rank, scores, reduce)`` for each shard holder in threads; reduce sums over all of them."""
    import threading

    barrier = threading.Barrier(len(halves))
    slots: list[Tensor | None] = [None] * len(halves)
    results: list[object] = [None] * len(halves)

    def run(rank: int) -> None:
        def reduce(counts: Tensor) -> None:
            slots[rank] = counts.clone()
            barrier.wait(10)
            counts.copy_(torch.stack([slot for slot in slots if slot is not None]).sum(0))
            barrier.wait(10)

        results[rank] = work(rank, halves[rank], reduce)  # type: ignore[operator]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(halves))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def row_shards(scores: list[Tensor], ranks: int) -> list[list[Tensor]]:
    """FSDP2's layout: each rank a slice of the rows of every tensor, some of them empty."""
    shards: list[list[Tensor]] = [[] for _ in range(ranks)]
    for score in scores:
        size = -(-score.shape[0] // ranks)
        for rank in range(ranks):
            shards[rank].append(score[rank * size : (rank + 1) * size])
    return shards


def test_keep_count() -> None:
    """Invariant 20: floor(vN + 1/2)."""
    assert [keep_count(v, 10) for v in (1.0, 0.5, 0.25, 0.34, 0.04)] == [10, 5, 3, 3, 0]
    assert keep_count(1.0, 84_934_656) == 84_934_656


def test_kth_largest_is_the_sorted_one() -> None:
    """Invariant 20: equals sorting for every k; scores are only read."""
    scores, before = awkward(), awkward()
    ordered = flat(scores).sort(descending=True).values
    for keep in range(1, len(ordered) + 1):
        found = kth_largest(scores, keep)
        assert found.shape == () and found.dtype == torch.float32
        assert found == ordered[keep - 1], keep
    assert kth_largest(scores, 0) == math.inf
    assert kth_largest([draw(5)], 9) == draw(5).min()
    assert all(torch.equal(a, b) for a, b in zip(scores, before, strict=True)) and torch.signbit(scores[3]).all()


def test_kth_largest_over_several_chunks() -> None:
    """More elements than one bite, all distinct in the upper bits or all alike in them."""
    for scores in (
        draw(700_001, seed=3),
        1.0 + torch.rand(600_000, generator=torch.Generator().manual_seed(0)) / 128,
    ):
        ordered = scores.sort(descending=True).values
        for keep in (1, 1234, 333_333, 599_999):
            assert kth_largest([scores], keep) == ordered[keep - 1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_agree_with_the_whole(ranks: int) -> None:
    """Invariant 20: threshold, masks and broken ties of row shards are those of the unsharded tensors."""
    scores = [score for score in awkward() if score.ndim == 2] + [torch.zeros(5, 3), torch.full((4, 4), 0.25)]
    shards = row_shards(scores, ranks)
    for keep in (0, 1, *range(5, flat(scores).numel(), 9)):  # some of them divide the ties
        found = lockstep_reduce(shards, lambda _, part, reduce, k=keep: kth_largest(part, k, reduce))
        assert all(threshold == kth_largest(scores, keep) for threshold in found)

        def kept(rank, part, reduce, k=keep):
            part = [score.clone() for score in part]
            threshold = kth_largest(part, k, reduce)
            break_ties_(part, threshold, k, tolerance=0.0, reduce=reduce, shard=(rank, ranks))
            return [score >= threshold for score in part]

        masks = lockstep_reduce(shards, kept)
        for n, whole in enumerate(naive_masks(scores, keep)):
            assert torch.equal(torch.cat([masks[rank][n] for rank in range(ranks)]), whole)  # type: ignore[index]


def density_after(scores: list[Tensor], threshold: Tensor) -> int:
    weights = [torch.ones(score.shape, dtype=torch.float64) for score in scores]
    apply_threshold_(weights, scores, threshold)
    return int(sum(weight.sum() for weight in weights))


def test_broken_ties_make_the_threshold_exact() -> None:
    """Invariant 20: after break_ties_ the bare comparison keeps exactly k, of equals the first."""
    finite = [score for score in awkward() if not (score == -math.inf).all()]
    for keep in range(1, flat(finite).numel(), 3):
        scores = [score.clone() for score in finite]
        masks, threshold = naive_masks(scores, keep), kth_largest(scores, keep)
        before = density_after(scores, threshold)
        assert break_ties_(scores, threshold, keep, tolerance=0.0) == before - keep
        assert density_after(scores, threshold) == keep
        for score, mask, old in zip(scores, masks, finite, strict=True):
            assert torch.equal(score >= threshold, mask)
            torch.testing.assert_close(score, old, rtol=2e-7, atol=1.2e-38)
        assert break_ties_(scores, threshold, keep, tolerance=0.0) == 0
        assert kth_largest(scores, keep) == threshold


def test_few_ties_are_tolerated() -> None:
    """Spec 5.5: an excess up to 0.1 % of all elements is left alone, more is not."""
    scores = [torch.arange(3000.0).clamp_min(4.0)]  # 0..4 tie at 4: five of them
    threshold = kth_largest(scores, 2997)
    assert break_ties_(scores, threshold, 2997) == 3
    assert density_after(scores, threshold) == 3000
    scores = [torch.arange(3000.0).clamp_min(9.0)]
    assert break_ties_(scores, kth_largest(scores, 2992), 2992) == 8
    assert density_after(scores, torch.tensor(9.0)) == 2992


def test_ties_at_zero_fall_below_any_flushing_to_zero() -> None:
    """The lowered zeros are normal numbers: a device that flushes subnormals still sees them below 0."""
    score = torch.zeros(4)
    assert break_ties_([score], torch.zeros(()), 1) == 3
    assert score.tolist() == [0.0] + [-torch.finfo(torch.float32).tiny] * 3


def test_apply_threshold_zeroes_what_is_below() -> None:
    """Invariant 23: exactly 0 below, untouched at and above; any dtype."""
    scores = [draw(5, 6, seed=1), draw(3, 4, seed=2)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weights = [draw(5, 6, seed=3).to(dtype).requires_grad_(), draw(3, 4, seed=4).to(dtype)]
        before = [weight.detach().clone() for weight in weights]
        threshold = kth_largest(scores, 17)
        apply_threshold_(weights, scores, threshold)
        for weight, old, score in zip(weights, before, scores, strict=True):
            for i in range(weight.shape[0]):
                for j in range(weight.shape[1]):
                    assert weight[i, j] == (0.0 if score[i, j] < threshold else old[i, j])
        assert sum(int((weight != 0).sum()) for weight in weights) == 17


def naive_rows(scores: list[Tensor], costs: list[int], budget: int) -> list[Tensor]:
    """Best rows first, as long as they fit."""
    rows = [(-float(value), m, i) for m, score in enumerate(scores) for i, value in enumerate(score)]
    masks = [torch.zeros(len(score), dtype=torch.bool) for score in scores]
    spent = 0
    for _, m, i in sorted(rows):
        spent += costs[m]
        if spent > budget:
            break
        masks[m][i] = True
    return masks


def row_scores() -> tuple[list[Tensor], list[int]]:
    """Two widths, ties, zeros, subnormals, a matrix without rows."""
    scores = [draw(20, seed=1).abs(), torch.zeros(6), torch.tensor([1e-45, 0.0, 0.25, 0.25, 3.0]), torch.zeros(0)]
    return [*scores, torch.full((7,), 0.25)], [8, 32, 32, 8, 5]


def test_rows_fill_the_budget_to_less_than_one_row() -> None:
    """LoSparse Eq. 9 weighted by fan-in: every budget, against a sort by hand."""
    scores, costs = row_scores()
    total = sum(cost * len(score) for cost, score in zip(costs, scores, strict=True))
    for budget in range(total + 1):
        masks = select_rows(scores, costs, budget)
        assert all(torch.equal(a, b) for a, b in zip(masks, naive_rows(scores, costs, budget), strict=True)), budget
        kept = sum(cost * int(mask.sum()) for cost, mask in zip(costs, masks, strict=True))
        assert budget - max(costs) < kept <= budget
    assert all(mask.all() for mask in select_rows(scores, costs, total))
    assert not any(mask.any() for mask in select_rows(scores, costs, 0))


def test_units_cost_what_their_rank_in_the_group_says() -> None:
    """Against a walk over the sorted units; costs are 0 from some rank on."""
    sizes, budget = (5, 1, 7), 40
    scores = draw(sum(sizes), seed=3)
    added = [[9, 9, 4, 0, 0], [6], [5, 5, 5, 5, 5, 5, 0]]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    spent, ranks, kept = 0, [0, 0, 0], set()
    for unit in scores.argsort(descending=True).tolist():
        spent += added[groups[unit]][ranks[groups[unit]]]
        ranks[groups[unit]] += 1
        if spent <= budget:
            kept.add(unit)
    costs = torch.tensor([cost for group in added for cost in group])
    found = select_units(scores, sizes, costs, budget)
    assert set(found.nonzero()[:, 0].tolist()) == kept and 0 < len(kept) < len(scores)
    assert not select_units(scores, sizes, costs, -1).any()
