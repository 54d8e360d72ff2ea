"""Which blocks of a model to keep: evenly spaced ones, or those whose removal raises a measured loss the most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Kept = dict[str, list[int]]  # name of a list of blocks -> numbers of the kept blocks, rising


def evenly_spaced(total: int, count: int, first: bool = False) -> list[int]:
    """Return ``count`` evenly spaced numbers below ``total``: floor((j + 1/2) total / count).

    Args:
        total: number of blocks.
        count: how many are kept, in [1, total].
        first: keep block 0 in place of the first of them.

    >>> evenly_spaced(6, 2), evenly_spaced(12, 4), evenly_spaced(6, 2, first=True)
    ([1, 4], [1, 4, 7, 10], [0, 4])
    """
    numbers = [(2 * j + 1) * total // (2 * count) for j in range(count)]
    return [0, *numbers[1:]] if first else numbers


def drop_greedily(
    totals: Mapping[str, int],
    counts: Mapping[str, int],
    losses: Callable[[Sequence[Kept]], Sequence[float]],
    first: bool = False,
) -> tuple[Kept, float]:
    """Remove one block after the other, each time the one without which the loss is smallest; return the kept ones.

    Args:
        totals: name of each list of blocks -> number of its blocks.
        counts: name -> how many are kept.
        losses: function of several choices that returns the loss of each.
        first: never remove block 0 of a list.

    Returns:
        The kept blocks, and their loss; 0 if nothing is removed.
    """
    kept = {name: list(range(total)) for name, total in totals.items()}
    loss = 0.0
    while candidates := [
        kept | {name: [other for other in numbers if other != number]}
        for name, numbers in kept.items()
        if len(numbers) > counts[name]
        for number in numbers[first:]
    ]:
        loss_of = list(losses(candidates))
        best = min(range(len(candidates)), key=loss_of.__getitem__)
        kept, loss = candidates[best], loss_of[best]
    return kept, loss
