"""Pruning of rows: its ranks, its schedule, and what it needs of a training."""

from __future__ import annotations

import pytest

from lit_compress.stages.rows import RowPruning, RowSparsePruning, _rank
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((768, 768), [4, 8, 12, 20, 39, 77, 116, 154, 192]),
        ((3072, 768), [7, 13, 19, 31, 62, 123, 185, 246, 308]),
        ((768, 3072), [7, 13, 19, 31, 62, 123, 185, 246, 308]),
        ((1024, 1024), [6, 11, 16, 26, 52, 103, 154, 205, 256]),
        ((4096, 1024), [9, 17, 25, 41, 82, 164, 246, 328, 410]),
    ],
)
def test_ranks_of_the_authors(shape, ranks):
    """Invariant 2: R = ceil(r out in / (out + in))."""
    assert [_rank(r / 100, *shape) for r in (1, 2, 3, 5, 10, 20, 30, 40, 50)] == ranks
    assert _rank(0.0, *shape) == 0


def test_schedule_longer_than_training():
    """The setting of the paper's Appendix D with 10 epochs: a window of -230 steps."""
    stage = RowSparsePruning(RowPruning(start=12800, end=51200), 0.3, 0.2)
    with pytest.raises(UserError, match=r"12800 \+ 51200 steps leave no step of total=63770"):
        stage.set_total_steps(63770)
    stage.set_total_steps(76524)


@pytest.mark.parametrize("low_rank", [0.1, 0.0])
def test_rows_are_not_chosen_before_the_first_scores(low_rank):
    """A stage that ends within the first window would choose them by scores that are all zero; 0.0 is ITP."""
    stage = RowSparsePruning(RowPruning(interval=10, start=0.0, end=0.0), 0.3, low_rank)
    for steps in (1, 10):
        with pytest.raises(UserError, match=r"prune.interval: the first scores are known after 10 steps"):
            stage.set_total_steps(steps)
    stage.set_total_steps(11)


def test_the_first_pruning_at_the_budget_is_after_the_first_scores():
    """A final phase that begins before them waits for the step after the interval."""
    stage = RowSparsePruning(RowPruning(interval=10, start=0.0, end=0.8), 0.3, 0.0)
    stage.set_total_steps(20)
    assert [stage.at_budget(step) for step in (4, 10, 11)] == [False, False, True]
