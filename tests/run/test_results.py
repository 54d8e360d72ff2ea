"""Costs and speed-ups of several runs: no two decimals that the timing does not carry."""

from __future__ import annotations

import json
import random

import pytest

from lit_compress.run.results import front, mean_costs, mean_gain, read_results
from lit_compress.utils.errors import UserError


def report(times: float | None, verdict: str | None = "faster", steady: bool = True) -> dict:
    timing = {"steady": steady, "speedup": {"median": times, "verdict": verdict}} if verdict else None
    return {"ratios": {"speedup": times}, "timing": timing}


def test_a_mean_speed_up_is_as_steady_as_its_timings():
    assert mean_gain([report(2.0), report(None), report(3.0, "slower")]) == (2.5, True)
    assert mean_gain([report(2.0), report(3.0, "unsteady")]) == (2.5, False)
    assert mean_gain([report(1.02, "noise")]) == mean_gain([report(1.02, steady=False)]) == (1.02, False)
    assert mean_gain([report(2.5, None)]) == (2.5, True)  # of an earlier version
    assert mean_gain([report(None)]) is mean_gain([]) is None


def test_a_cost_is_the_mean_of_the_known_ones():
    none = dict.fromkeys(("parameters", "flops", "bytes", "latency"))
    assert mean_costs([none | {"latency": 7.5}, none | {"latency": 4, "bytes": 2}, none]) == none | {
        "latency": 5.75, "bytes": 2
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_front_is_what_no_other_is_better_than(mode):
    draw, sign = random.Random(0), 1 if mode == "max" else -1
    for _ in range(20):
        points = {(draw.randrange(5), draw.randrange(5)) for _ in range(8)}
        best = {
            (x, y) for x, y in points
            if not any(a <= x and sign * b >= sign * y and (a, b) != (x, y) for a, b in points)
        }  # fmt: skip
        assert front(list(points), mode) == sorted(best)


@pytest.mark.parametrize("record", [None, [], {}, {"cells": 1}, {"cells": [1]}, {"cells": [{"method": "LPAF"}]}])
def test_a_damaged_comparison_is_refused(record, tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="is not the record of a comparison; run compare again"):
        read_results(tmp_path)
