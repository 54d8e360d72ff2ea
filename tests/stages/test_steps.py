"""The number of optimizer steps of a stage."""

from __future__ import annotations

import pytest

from lit_compress.stages.base import count_steps


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(None, 1030), (100, 1000), (100.0, 1000), (200, 1030), (200.0, 1030), (1, 10), (1.0, 1030), (0.5, 510)],
)
def test_a_limit_is_a_number_of_steps_or_a_fraction_of_at_most_one(limit, steps):
    assert count_steps(103, epochs=10, limit=limit) == steps


def test_most_steps():
    assert count_steps(103, epochs=10, max_steps=100) == 100
