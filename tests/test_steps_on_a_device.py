"""What a training step asks of a device: one wait, and few operator calls beyond forward, backward and AdamW."""

from __future__ import annotations

from typing import Any

import processes
import pytest
from contract_cases import OF_STAGES

from benchmarks.device.run import METHODS, measure

FAST: dict[str, list[str]] = {"SVD": [], "LPAF": []}


def count(runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return run -> stage -> what its steps ask of the device."""
    return {run: {row["stage"]: row for row in measure(run.split()[0], *words)} for run, words in runs.items()}


@pytest.fixture(scope="module")
def counted():
    return processes.on_second_device(count, FAST)


def check_waits(stages):
    """A wait for whether gradients are finite, a copy of every column of the batch."""
    for stage, row in stages.items():
        assert (row["waits"], row["to_host"], row["to_device"]) == (1, 0, 5), f"{stage}: {row}"


@pytest.mark.parametrize("run", FAST)
def test_a_step_waits_once(counted, run):
    check_waits(counted[run])


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method in OF_STAGES and method not in FAST])
def test_a_step_of_every_class_of_stage_waits_once(method):
    check_waits(processes.on_second_device(count, {method: []})[method])


def test_pruning_makes_few_calls_more(counted):
    """Scores, threshold and the loss on the teacher's logits; without its forward, which the dense stage has not."""
    dense, prune = counted["LPAF"]["dense"], counted["LPAF"]["prune"]
    assert prune["calls"] - prune["teacher"] <= 1.1 * dense["calls"]
    assert prune["most"]["waits"] <= 7  # in the last step, which computes a threshold and logs


def test_two_forwards_make_at_most_twice_the_calls(counted):
    one, two = (counted[run]["retrain"]["calls"] - counted[run]["retrain"]["teacher"] for run in ("SVD", "LPAF"))
    assert two <= 2.0 * one
