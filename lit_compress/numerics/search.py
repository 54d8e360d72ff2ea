"""The search that meets a budget: the largest number that fits, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

HALVINGS = 60  # of an interval of reals


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
