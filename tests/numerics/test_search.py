"""``largest`` against a scan of all numbers, for whatever monotone function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lit_compress.numerics.search import largest

INTEGERS = st.integers(-300, 300)
REALS = st.floats(-1e6, 1e6)


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


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_large_integers_are_exact(limit: int, high: int) -> None:
    assert largest(lambda number: number <= limit, 0, high) == min(limit, high)


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


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(0, 400))
def test_sums_that_rise_in_steps(sizes: list[int], budget: int) -> None:
    count = largest(lambda number: sum(sizes[:number]) <= budget, 0, len(sizes))
    assert sum(sizes[:count]) <= budget
    assert count == len(sizes) or sum(sizes[: count + 1]) > budget
