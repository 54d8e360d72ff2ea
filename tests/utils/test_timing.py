"""Times by a clock that the test sets; the verdict against a naive one."""

from __future__ import annotations

import random
from statistics import median

import numpy as np
import pytest
import torch

from lit_compress.utils.timing import STEADY, in_turns, pinned, speedup, spread, summary


class Clock:
    """Seconds that only pass while a function works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name, *seconds):
        """Return a function that takes these seconds in turn, the last of them for ever."""
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_turns_are_taken_and_the_first_rounds_do_not_count():
    clock = Clock()
    times = in_turns([clock.work("a", 9, 9, 1, 2), clock.work("b", 9, 9, 4, 6)], 2, warm_up=2, clock=clock)
    assert times == [[1000, 2000], [4000, 6000]] and "".join(clock.calls) == "abababab"


def test_no_round_begins_when_the_time_is_over():
    """But some are always made, and what is slow is warmed up once."""
    clock = Clock()
    times = in_turns([clock.work("a", 1)], 30, warm_up=2, seconds=10, clock=clock)
    assert len(times[0]) == 11  # the last began at 10
    slow = in_turns([clock.work("a", 100)], 30, seconds=10, least=3, clock=clock)
    assert len(slow[0]) == 3 and clock.now == 13 + 400


@pytest.mark.parametrize("seed", range(8))
def test_summary_and_verdict_by_hand(seed):
    """The ratio is that of a round; p10 and p90 are numpy's."""
    rng = random.Random(seed)
    gain, noise = rng.choice([0.5, 1.0, 1.05, 2.0]), rng.choice([0.01, 0.1, 0.6])
    drift = [rng.uniform(1, 3) for _ in range(25)]  # of the machine, over both
    fast = [d * rng.uniform(1, 1 + noise) for d in drift]
    slow = [d * gain * rng.uniform(1, 1 + noise) for d in drift]
    low, high = np.quantile(np.array(slow) / np.array(fast), [0.1, 0.9])
    found = speedup(slow, fast)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.median == median(a / b for a, b in zip(slow, fast, strict=True))
    if low > 1 and high / low < STEADY:
        wanted = "faster"
    elif high < 1 and high / low < STEADY:
        wanted = "slower"
    else:
        wanted = "noise" if low <= 1 <= high else "unsteady"
    assert found.verdict == wanted
    assert summary(slow) == {"median": median(slow), "p10": pytest.approx(np.quantile(slow, 0.1)),
                             "p90": pytest.approx(np.quantile(slow, 0.9))}  # fmt: skip


def test_a_busy_machine_is_not_trusted():
    """15 ms with a p90 of 28 are no measurement."""
    assert spread([14.0] * 3 + [15.0] * 5 + [28.0] * 3) > STEADY
    quiet = [15.0 + 0.1 * i for i in range(20)]
    assert spread(quiet) == pytest.approx(16.71 / 15.19, abs=1e-3)
    assert spread([4.0]) == 1.0


def test_threads_and_gradients_are_given_back():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), pinned(before + 1):
        assert torch.get_num_threads() == before + 1 and torch.is_inference_mode_enabled()
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before and not torch.is_inference_mode_enabled()
