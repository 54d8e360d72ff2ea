"""What a training step asks of a device: one wait, and few operator calls beyond forward, backward and AdamW."""

from __future__ import annotations

from typing import Any

import processes
import pytest

from benchmarks.device.run import measure

RUNS: dict[str, list[str]] = {"SVD": [], "LPAF": []}


def count(runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return run -> stage -> what its steps ask of the device."""
    return {run: {row["stage"]: row for row in measure(run.split()[0], *words)} for run, words in runs.items()}


@pytest.fixture(scope="module")
def counted():
    return processes.on_second_device(count, RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_a_step_waits_once(counted, run):
    """For whether gradients are finite; a copy of every column of the batch. Other methods: test_contract.py."""
    for stage, row in counted[run].items():
        assert (row["waits"], row["to_host"], row["to_device"]) == (1, 0, 5), f"{stage}: {row}"


def test_pruning_makes_few_calls_more(counted):
    """Scores, threshold and the loss on the teacher's logits; without its forward, which the dense stage has not."""
    dense, prune = counted["LPAF"]["dense"], counted["LPAF"]["prune"]
    assert prune["calls"] - prune["teacher"] <= 1.1 * dense["calls"]
    assert prune["most"]["waits"] <= 7  # in the last step, which computes a threshold and logs


def test_two_forwards_make_at_most_twice_the_calls(counted):
    one, two = (counted[run]["retrain"]["calls"] - counted[run]["retrain"]["teacher"] for run in ("SVD", "LPAF"))
    assert two <= 2.0 * one
