"""The searches that meet a budget: the largest number that fits, by bisection, or by few costs that are dear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

HALVINGS = 60  # of an interval of reals
TRIES, CLOSE = 5, 0.04  # costs that are asked for, and the share of the limit that may be left
LEAST = 0.02  # a number below which no other is tried


def largest(fits: Callable[[Number], bool], low: Number, high: Number) -> Number:
    """Return the largest number in [low, high] that fits; ``low``, which is not tried, if no other does.

    Args:
        fits: function of a number that is True up to some number and False above it.
        low: an integer to search integers, or a real number.
        high: of the same type; reals are found to 2**-60 of ``high - low``.

    >>> largest(lambda number: number**2 <= 50, 0, 100)
    7
    """
    if fits(high):
        return high
    for _ in range(HALVINGS):
        middle = (low + high) // 2 if isinstance(low, int) else (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def within_limit(
    cost: Callable[[float], float | None],
    limit: float,
    known: dict[float, float],
    first: float | None = None,
) -> float | None:
    """Return about the largest number in (0, 1) whose cost is within a limit, where every cost is dear to find out.

    Costs rise with the number, nearly on a straight line. The next number is where the line through the two nearest
    known ones is a little below the limit.

    Args:
        cost: of a number; None: it is too small.
        limit: the largest cost.
        known: costs by number, including 1.0's, above the limit; new ones are added.
        first: number to begin with; None: as if costs went through 0.

    Returns:
        None if no number that was tried is within the limit.

    >>> round(within_limit(lambda x: 0.1 + 0.9 * x, 0.5, {1.0: 1.0}), 2)
    0.43
    """
    refused = 0.0
    for _ in range(TRIES):
        below, above = [x for x in known if known[x] <= limit], [x for x in known if known[x] > limit]
        if (below and known[max(below)] >= limit * (1 - CLOSE)) or min(above) < LEAST:
            break
        low, high = max(below, default=refused), min(above)
        if len(known) == 1:
            x = first if first is not None else 0.8 * limit / known[high]
        else:
            a, b = (low, high) if below else sorted(known)[:2]
            rise = (known[b] - known[a]) / (b - a)
            x = a + (limit * (1 - CLOSE / 2) - known[a]) / rise if rise else low
        edge = 0.02 * (high - low)
        x = x if low + edge < x < high - edge else low + (edge if below else (high - low) / (2 if refused else 10))
        if (value := cost(x)) is None:
            refused = max(refused, x)
        else:
            known[x] = value
    return max((x for x in known if known[x] <= limit), default=None)
