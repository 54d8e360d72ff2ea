"""What a training step asks of a device: one wait, and few operator calls beyond forward, backward and AdamW."""

from __future__ import annotations

from typing import Any

import processes
import pytest

from benchmarks.device.run import METHODS, measure

FAST = {"SVD": [], "LPAF": [], "LPAF alone": ["--model.distillation.alpha", "0"]}


def count(runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return run -> stage -> what its steps ask of the device."""
    return {run: {row["stage"]: row for row in measure(run.split()[0], *words)} for run, words in runs.items()}


@pytest.fixture(scope="module")
def counted():
    return processes.on_second_device(count, FAST)


def check_waits(stages, most=1):
    """A wait for whether gradients are finite, a copy of every column of the batch; at most ``most`` waits."""
    for stage, row in stages.items():
        assert 1 <= row["waits"] <= most, f"{stage}: {row}"
        assert row["to_host"] < most and row["to_device"] < 5 + most, f"{stage}: {row}"


@pytest.mark.parametrize("run", FAST)
def test_a_step_waits_once(counted, run):
    check_waits(counted[run])


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method not in FAST])
def test_a_step_of_every_method_waits_once(method):
    most = 2 if method == "CoFiLoSparse" else 1  # half of its steps choose rows, on the CPU
    check_waits(processes.on_second_device(count, {method: []})[method], most)


def test_pruning_makes_few_calls_more(counted):
    """Without a teacher, whom the dense stage has not either."""
    dense, prune = counted["LPAF alone"]["dense"], counted["LPAF alone"]["prune"]
    assert prune["calls"] <= 1.1 * dense["calls"]
    assert prune["most"]["waits"] <= 7  # in the last step, which computes a threshold and logs


def test_two_forwards_make_at_most_twice_the_calls(counted):
    one, two = (counted[run]["retrain"]["calls"] - counted[run]["retrain"]["teacher"] for run in ("SVD", "LPAF"))
    assert two <= 2.0 * one
