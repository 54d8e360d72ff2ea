"""How many threads a run works with."""

from __future__ import annotations

import pytest
import torch

from lit_compress.run.threads import SMALL, choose_threads, use_threads


@pytest.mark.parametrize(
    ("weights", "cores", "recorded", "expected"),
    [(SMALL - 1, 8, None, 1), (SMALL, 8, None, 8), (SMALL, 8, 2, 2), (1, 8, 4, 4), (1, 1, None, 1)],
)
def test_a_small_net_has_one_thread_and_a_continued_run_its_own(weights, cores, recorded, expected):
    assert choose_threads(weights, cores, recorded) == expected


def test_the_environment_decides_first(monkeypatch):
    pinned = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads(SMALL, recorded=3) == pinned
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    try:
        assert use_threads(SMALL, recorded=3) == 3
    finally:
        torch.set_num_threads(pinned)
