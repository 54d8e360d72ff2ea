"""The schedules against the papers' formulas, written out."""

from __future__ import annotations

import itertools

import pytest

from lit_compress.numerics.schedules import cubic, linear_to, linear_warmup_decay
from lit_compress.utils.errors import UserError


def naive_cubic(t: int, T: int, t_i: int, t_f: int, v_f: float) -> float:
    if t < t_i:
        return 1.0
    if t < T - t_f:
        return v_f + (1 - v_f) * ((T - t_f - t) / (T - t_f - t_i)) ** 3
    return v_f


@pytest.mark.parametrize(("total", "start", "end"), [(100, 10, 30), (7, 2, 3), (5, 0, 0), (1, 0, 0)])
@pytest.mark.parametrize("final", [0.0, 0.1, 0.5, 1.0])
def test_cubic_is_the_formula(total: int, start: int, end: int, final: float) -> None:
    """Invariant 19: ends, monotone, and equal to Eq. 5."""
    values = [cubic(t, total, start, end, final) for t in range(total + 1)]
    assert values[0] == values[start] == 1.0 or total == 1
    assert values[total - end] == values[total] == final
    assert all(a >= b for a, b in itertools.pairwise(values))
    for t, value in enumerate(values):
        assert value == pytest.approx(naive_cubic(t, total, start, end, final), abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(total=10, start=4, end=6, final=0.5), ["4 + 6", "total=10", "at most 9"]),
        (dict(total=0, start=0, end=0, final=0.5), ["total=0", "at least 1"]),
    ],
)
def test_cubic_refuses(arguments: dict[str, float], said: list[str]) -> None:
    """Invariant 19: an invalid schedule says in one line what would fit."""
    with pytest.raises(UserError) as caught:
        cubic(0, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("total", [1, 2, 7, 10, 101])
@pytest.mark.parametrize("initial", [0.0, 0.1, 0.7, 1.0])
def test_decay_is_linear_to_half_of_the_steps(total: int, initial: float) -> None:
    """Invariant 29: p(0) = p_init, p(T/2) = 0, linear in between, never negative, also with odd T."""
    decay = 2 * initial / total
    values = [linear_to(t, 0, total / 2, initial, 0.0) for t in range(total + 1)]
    assert values[0] == initial
    for t, value in enumerate(values):
        assert value == pytest.approx(max(0.0, initial - decay * t), abs=1e-12)
        assert value >= 0.0
        assert (value == 0.0) == (initial == 0.0 or 2 * t >= total)


def test_learning_rate_factor() -> None:
    assert [linear_warmup_decay(t, 10, 2) for t in range(12)] == pytest.approx(
        [0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]
    )
    assert linear_warmup_decay(0, 4, 0) == 1.0
    assert linear_warmup_decay(4, 4, 4) == 0.0


def test_linear_to() -> None:
    """Flat, a straight line with exact ends, flat; a length of 0 jumps."""
    assert [linear_to(t, 2, 4, 1.0, 0.2) for t in range(8)] == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert linear_to(6, 2, 4, 1.0, 0.2) == 0.2 and linear_to(2, 2, 4, 1.1, 0.2) == 1.1
    assert [linear_to(t, 3, 0, 1.0, 0.2) for t in (2, 3)] == [1.0, 0.2]
