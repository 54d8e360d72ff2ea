"""The searches that meet a budget: the largest number that fits, by bisection, or by few costs that are dear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

HALVINGS = 60  # of an interval of reals
TRIES, CLOSE = 5, 0.04  # costs that are asked for, and the share of the limit that may be left
LEAST = 1e-3  # the smallest interval, as a share of the number below


def largest(fits: Callable[[Number], bool], low: Number, high: Number) -> Number:
    """Return the largest number in [low, high] that fits; ``low``, which is not tried, if no other does.

    Numbers fit up to some one and not above it. Bounds are integers, or reals, which are found to 2**-60 of their
    distance.

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
    close: float = CLOSE,
    tries: int = TRIES,
) -> float | None:
    """Return about the largest number in (0, 1] whose cost is within a limit; None if none that was tried is.

    Costs rise with the number, nearly on a straight line: the next number is where the line through the two nearest
    known ones is a little below the limit. After :data:`TRIES` numbers every other one halves the interval, for costs
    that rise by steps.

    Args:
        cost: of a number; None: it is too small.
        limit: the largest cost.
        known: costs by number, including 1.0's; new ones are added.
        first: number to begin with; None: as if costs went through 0.
        close: the share of the limit that may be left.
        tries: costs that are asked for at most.

    >>> round(within_limit(lambda x: 0.1 + 0.9 * x, 0.5, {1.0: 1.0}), 2)
    0.43
    """
    refused = 0.0
    for turn in range(tries):
        below, above = [x for x in known if known[x] <= limit], [x for x in known if known[x] > limit]
        low, high = max(below, default=refused), min(above, default=0.0)
        if high - low < LEAST * (low if below else 2) or (below and known[low] >= limit * (1 - close)):
            break
        if len(known) == 1:
            x = first if first is not None else 0.8 * limit / known[high]
        else:
            a, b = (low, high) if below else sorted(known)[:2]
            rise = (known[b] - known[a]) / (b - a)
            x = a + (limit * (1 - close / 2) - known[a]) / rise if rise else low
        edge = 0.02 * (high - low)
        x = x if low + edge < x < high - edge else low + (edge if below else (high - low) / (2 if refused else 10))
        x = (low + high) / 2 if turn >= TRIES and turn % 2 else x
        if (value := cost(x)) is not None:
            known[x] = value
        elif below:
            known[x] = known[high]  # as if it were as dear
        else:
            refused = max(refused, x)
    return max((x for x in known if known[x] <= limit), default=None)
