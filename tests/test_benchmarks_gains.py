"""Speed-ups in the tables of the studies: one for equal shapes, no two decimals that the timing does not carry."""

from __future__ import annotations

import pytest

from benchmarks.gains import Gain, costs_of, shared_gains


def report(times: float | None, verdict: str | None = "faster", params: int = 7, steady: bool = True) -> dict:
    timing = {"steady": steady, "speedup": {"median": times, "verdict": verdict}} if verdict else None
    compressed = {"params": {"sites": params, "total": 9}, "flops": 10 * params}
    return {"task": "sst2", "compressed": compressed, "ratios": {"speedup": times}, "timing": timing}


def test_equal_shapes_have_one_speed_up():
    """2.15x and 4.88x of two models of one size, both too noisy; a third one was timed well."""
    noisy = [report(2.15, "unsteady"), report(4.88, "unsteady")]
    assert shared_gains(noisy) == [Gain(pytest.approx(3.515), steady=False)] * 2
    assert [*map(str, shared_gains([*noisy, report(3.0), report(3.2), report(2.0, params=8)]))] == [
        "3.10x", "3.10x", "3.10x", "3.10x", "2.00x",
    ]  # fmt: skip


def test_only_steady_times_are_named():
    assert shared_gains([report(1.02, "noise")]) == shared_gains([report(1.02, steady=False)]) == [Gain(1.02, False)]
    assert shared_gains([report(2.5, None), report(None)]) == [Gain(2.5), None]  # an earlier version, and not timed


def test_latencies_of_different_times_are_compared_by_speed_ups():
    def timed(dense_ms: float, ms: float, speedup: float | None) -> dict:
        nets = {"dense": {"latency_ms": {"median": dense_ms}, "bytes": 8}, "compressed": {"latency_ms": {"median": ms}}}
        return {**nets, "ratios": {"speedup": speedup}}

    # the same net on a machine that became half as fast, and one that was not timed in turns
    found, dense = costs_of([timed(10, 5, 2.0), timed(20, 10, 2.0), timed(15, 4, None)])
    assert [costs["latency"] for costs in found] == [7.5, 7.5, 4] and dense["latency"] == 15 and dense["bytes"] == 8
    assert costs_of([]) == ([], dict.fromkeys(("parameters", "flops", "bytes", "latency")))
