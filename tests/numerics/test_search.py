"""``largest`` against a scan of all numbers, for whatever monotone function; ``within_limit`` asks for few costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_compress.numerics.search import CLOSE, TRIES, largest, within_limit

INTEGERS = st.integers(-300, 300)
REALS = st.floats(-1e6, 1e6)


@settings(deadline=None)  # of a machine with other work
@given(INTEGERS, st.integers(0, 200), INTEGERS)
def test_integers_are_those_of_a_scan(low: int, more: int, limit: int) -> None:
    asked = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    scan = low
    for number in range(low, low + more + 1):
        if number <= limit:
            scan = number
    assert largest(fits, low, low + more) == scan
    assert len(asked) <= 2 + more.bit_length() and all(low <= number <= low + more for number in asked)


@settings(deadline=None)  # of a machine with other work
@given(REALS, st.floats(0, 1e6), REALS)
def test_reals_fit_and_are_close_below_the_limit(low: float, more: float, limit: float) -> None:
    high = low + more
    found = largest(lambda number: number <= limit, low, high)
    assert low <= found <= high and isinstance(found, float)
    if limit <= low:
        assert found == low
    elif limit >= high:
        assert found == high
    else:
        assert found <= limit and limit - found <= (high - low) * 2**-59 + 1e-15 * max(abs(low), abs(high))


@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("power", [0.9, 1.0, 1.2])
@pytest.mark.parametrize("limit", [0.35, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("first", [None, 0.3])
def test_the_largest_number_of_nearly_a_line(fixed, power, limit, first):
    asked = []

    def cost(x):
        asked.append(x)
        return fixed + (1 - fixed) * x**power

    found = within_limit(cost, limit, {1.0: 1.0}, first)
    best = ((limit - fixed) / (1 - fixed)) ** (1 / power)
    assert found is not None and found <= best and len(asked) <= TRIES
    assert cost(found) >= limit * (1 - 2 * CLOSE)
    assert first is None or asked[0] == first


def test_what_cannot_be():
    asked = []
    assert within_limit(lambda x: asked.append(x) or 0.3 + 0.7 * x, 0.2, {1.0: 1.0}) is None
    assert len(asked) <= 3  # the line says so soon
    assert within_limit(lambda x: None, 0.2, {1.0: 1.0}) is None


def test_numbers_that_are_too_small_are_refused():
    found = within_limit(lambda x: None if x < 0.1 else 0.05 + 0.95 * x, 0.16, {1.0: 1.0}, 0.02)
    assert found is not None and 0.1 <= found <= (0.16 - 0.05) / 0.95
