"""The table and the figure of several models: the front by a naive loop, what is shown."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from lit_compress.analysis.alternatives import (
    COSTS,
    alternatives,
    alternatives_figure,
    alternatives_table,
    fronts,
    shapes_shown,
)


def made(seed=0, mode="max", lengths=(32, 128)):
    draw = random.Random(seed)
    keys = [(net, runtime) for net in ("dense", "one", "two", "compressed") for runtime in ("eager", "onnx-int8")]

    def entry(net, runtime):
        return {
            "net": net,
            "runtime": runtime,
            "median": draw.choice([1.0, 2.0, 3.0, 4.0]),
            "steady": draw.random() > 0.3,
        }

    return {
        "metric": {"name": "accuracy", "mode": mode}, "own_lengths": {"median": 32},
        "programs": [
            {"net": net, "runtime": runtime, "bytes": draw.choice([None, 1_000_000, 2_000_000]),
             "metric": draw.choice([0.7, 0.8, 0.9]), "interval": draw.choice([None, [0.6, 0.9]]),
             "far": (net, runtime) == ("dense", "onnx-int8")}
            for net, runtime in keys
        ],
        "shapes": [
            {"batch": batch, "length": length, "times": [entry(*key) for key in keys]}
            for length in lengths for batch in (1, 8, 32)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_front_is_what_no_other_is_better_than(mode):
    for seed in range(20):
        rows, sign = alternatives(made(seed, mode)), 1 if mode == "max" else -1
        for cost, best in fronts(rows, mode).items():
            field = COSTS[cost]
            known = [row for row in rows if getattr(row, field) is not None]
            points = {
                (getattr(row, field), row.metric) for row in known
                if not any(
                    getattr(other, field) <= getattr(row, field) and sign * other.metric >= sign * row.metric
                    and (getattr(other, field), other.metric) != (getattr(row, field), row.metric)
                    for other in known
                )
            }  # fmt: skip
            assert {(getattr(row, field), row.metric) for row in best} == points and len(best) == len(points)


def test_a_row_has_what_was_measured():
    result = made()
    first, last = shapes_shown(result)
    assert (first["batch"], first["length"], last["batch"], last["length"]) == (1, 32, 32, 32)
    rows = alternatives(result)
    assert [(row.net, row.runtime) for row in rows] == [(e["net"], e["runtime"]) for e in result["programs"]]
    for row, program, one, many in zip(rows, result["programs"], first["times"], last["times"], strict=True):
        assert row.metric == program["metric"] and row.milliseconds == one["median"]
        assert row.texts == 32 / (many["median"] / 1000)
        assert row.error == (None if program["interval"] is None else pytest.approx(0.15))
    result["programs"][0].pop("metric")
    assert len(alternatives(result)) == len(rows) - 1


def test_table_and_figure_have_every_row():
    result, out = made(), io.StringIO()
    Console(file=out, width=200).print(alternatives_table(result))
    assert out.getvalue().count("onnx-int8") == 4 and out.getvalue().count("!") == 1
    assert "texts/s, 32 x 32" in out.getvalue()
    panels = alternatives_figure(result).axes
    assert [axes.get_xlabel() for axes in panels] == ["ms, 1 x 32 tokens", "MB"]
    assert len(panels[0].containers) == 8
