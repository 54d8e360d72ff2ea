"""The final table: how sure the metric is and of how many rows; narrow enough for a terminal, plain in a log."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from transformers import BertConfig

from lit_compress.evaluation.intervals import standard_error, wilson
from lit_compress.export.report import add_intervals, generation_lines, markdown, print_table, score_line, speed_lines

PARAMS = {"sites": 85_054_464, "non_embedding": 85_648_130, "total": 109_483_778}
TIMES = {"median": 112.48, "p10": 110.22, "p90": 131.94, "batch": 1, "length": 128, "threads": 1}


def entry(metric, **values):
    return {"metric": metric, "initial": 0.5, "density": 0.2461, "kept": 0.25, "stored": 0.9999, "params": PARAMS,
            "flops": 22_354_000_000, "bytes": 437_958_648, "latency_ms": TIMES} | values  # fmt: skip


def report(name="accuracy", **values):
    """Of four nets of the size of BERT."""
    stages = {stage: entry(metric) for stage, metric in
              (("dense", 0.92), ("prune", 0.9), ("retrain", 0.81), ("compressed", 0.8165))}  # fmt: skip
    return {
        "task": "sst2", "method": "CoFiLoSparse", "stages": stages, "dense": stages["dense"],
        "compressed": stages["compressed"], "metric": {"name": name, "rows": 872, "available": 872}, **values,
    }  # fmt: skip


def splits(rows, available):
    return {"splits": [{"rows": rows, "available": available}]}


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, "872 of 872 rows"),
        ({"metric": {"name": "accuracy", "rows": 64, "available": 872}}, "64 of 872 rows"),
        ({"metric": {"name": "accuracy", "rows": 5_463, "available": None}}, "5,463 rows"),
        ({"data": splits(67_349, 67_349)}, "872 of 872 rows"),
        ({"data": splits(96, 67_349)}, "872 of 872 rows; 96 of 67,349 training rows were used"),
    ],
)
def test_the_metric_has_its_number_of_rows_and_its_standard_error(values, rows):
    made = report(**values)
    add_intervals(made, {"compressed": wilson(0.8165, made["metric"]["rows"])})
    error = (0.8165 * 0.1835 / made["metric"]["rows"]) ** 0.5
    assert standard_error(made["compressed"]["interval"]) == pytest.approx(error, rel=0.03)
    shown = f"{standard_error(made['compressed']['interval']):.4f}"
    assert score_line(made) == f"dev accuracy 0.8165 ± {shown} ({rows})"
    assert f"| ± {shown} |" in markdown(made)
    assert made["dense"]["interval"] == list(wilson(0.92, made["metric"]["rows"]))


def test_only_what_was_drawn_is_known_of_other_metrics():
    made = report("matthews")
    add_intervals(made, {"dense": (0.90, 0.94), "prune": None, "compressed": (0.80, 0.84)})
    assert made["dense"]["interval"] == [0.90, 0.94] and made["compressed"]["interval"] == [0.80, 0.84]
    assert [made["stages"][name]["interval"] for name in ("prune", "retrain")] == [None, None]
    assert score_line(made) == "dev matthews 0.8165 ± 0.0102 (872 of 872 rows)"
    add_intervals(made, {})
    assert score_line(made) == "dev matthews 0.8165 (872 of 872 rows)" and "standard error" not in markdown(made)


@pytest.mark.parametrize(("constant", "marked"), [({"constant": 0.9, "constant_error": 0.01}, True), ({}, False),
                                                  ({"constant": 0.9, "constant_error": 0.005}, False)])  # fmt: skip
def test_the_ratio_of_a_dense_model_near_a_constant_answer_is_marked(constant, marked):
    assert ("0.887 (chance) |" in markdown(report(**constant))) == marked


def test_a_report_of_an_earlier_version_is_shown():
    made = report(metric={"name": "accuracy", "mode": "max"})
    assert score_line(made) == "dev accuracy 0.8165" and "0.8165" in markdown(made)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_is_plain_and_no_wider_than_a_screen(encoding, monkeypatch):
    """Also where it cannot hold every character."""
    made = report(data=splits(96, 67_349))
    add_intervals(made, {"compressed": wilson(0.8165, 872)})
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log, encoding=encoding, write_through=True))
    print_table(made)
    lines = log.getvalue().decode(encoding).splitlines()
    assert "\x1b" not in "".join(lines) and max(map(len, lines)) <= 100
    assert any("0.8165" in line and "872 rows" in line for line in lines)


def timed(monkeypatch, dense, small):
    """Return a report whose latency is that of nets with these times."""
    from lit_compress.export import report as module

    monkeypatch.setattr(module, "forward_times", lambda nets, length: [dense, small])
    made = report()
    made["ratios"] = {}
    net, task = SimpleNamespace(config=BertConfig()), SimpleNamespace(length=23)
    made["timing"] = module.add_latency([made["dense"], made["compressed"]], [net, net], task)
    return made


QUIET = [14.0, 14.2, 14.1, 14.3, 14.2, 14.0, 14.1, 14.4, 14.2, 14.1]


def test_a_speed_up_is_named_if_the_spread_carries_it(monkeypatch):
    made = timed(monkeypatch, QUIET, [time / 2 for time in QUIET])
    assert made["dense"]["latency_ms"] == {
        "median": pytest.approx(14.15), "p10": 14.0, "p90": pytest.approx(14.31), "batch": 1, "length": 23, "threads": 1
    }  # fmt: skip
    assert made["timing"]["steady"] and made["timing"]["rounds"] == 10
    assert made["timing"]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0, "verdict": "faster"}
    assert speed_lines(made) == ["speed-up 2.00x (2.00-2.00)"] and "| 2.00x |" in markdown(made)
    made = timed(monkeypatch, QUIET, QUIET[::-1])
    assert speed_lines(made) == ["speed-up within the noise"] and "| noise |" in markdown(made)


def test_the_times_of_a_busy_machine_are_not_to_be_trusted(monkeypatch):
    made = timed(monkeypatch, QUIET, [15.0, 28.0] * 5)
    assert not made["timing"]["steady"] and made["timing"]["spread"] == pytest.approx(28 / 15)
    busy = "the times are not to be trusted: the machine was busy, p90 is up to 1.9 times p10"
    assert speed_lines(made)[1:] == [busy]
    assert speed_lines(report()) == []  # of earlier versions


def test_what_a_net_writes_cannot_command_the_terminal():
    texts = {"prompt": "one\ntwo", "dense": "\x1b[2Jthree", "compressed": "four\u202e\x07", "tokens": 3, "same": 0}
    lines = generation_lines({"generation": texts})
    assert lines[:3] == ["prompt: one two", r"dense: \u001b[2Jthree", r"compressed: four\u202e\u0007"]
    assert generation_lines({"generation": None}) == []
