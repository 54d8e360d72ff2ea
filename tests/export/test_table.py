"""The final table: how sure the metric is and of how many rows; narrow enough for a terminal, plain in a log."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig

from lit_compress.evaluation.intervals import standard_error, wilson
from lit_compress.export import report as reports
from lit_compress.export.table import markdown, print_table, score_lines, speed_line

PARAMS = {"sites": 85_054_464, "non_embedding": 85_648_130, "total": 109_483_778}
TIMES = {"median": 112.48, "p10": 110.22, "p90": 131.94, "batch": 1, "length": 128, "threads": 1}


def entry(metric, **values):
    return {"metric": metric, "initial": 0.5, "density": 0.2461, "stored": 0.9999, "params": PARAMS,
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
        ({"metric": {"name": "accuracy", "rows": 5_463, "available": None}}, "5,463 rows"),
        ({"data": splits(96, 67_349)}, "872 of 872 rows; 96 of 67,349 training rows were used"),
    ],
)
def test_the_metric_has_its_number_of_rows_and_its_standard_error(values, rows):
    made = report(**values)
    made["compressed"]["interval"] = wilson(0.8165, made["metric"]["rows"])
    error = (0.8165 * 0.1835 / made["metric"]["rows"]) ** 0.5
    assert standard_error(made["compressed"]["interval"]) == pytest.approx(error, rel=0.03)
    shown = f"{standard_error(made['compressed']['interval']):.4f}"
    assert score_lines(made) == [f"dev accuracy 0.8165 ± {shown} ({rows})"]
    assert f"| ± {shown} |" in markdown(made)


def test_only_what_was_drawn_is_known_of_other_metrics():
    made = report("matthews")
    assert score_lines(made) == ["dev matthews 0.8165 (872 of 872 rows)"] and "standard error" not in markdown(made)
    made["compressed"]["interval"] = [0.80, 0.84]
    assert score_lines(made) == ["dev matthews 0.8165 ± 0.0102 (872 of 872 rows)"]


@pytest.mark.parametrize(("constant", "marked", "told"), [((0.9, 0.01), True, True), ((0.9, 0.005), True, True),
                                                          ((0.8, 0.01), True, True), ((0.8, 0.005), False, False),
                                                          (None, False, False)])  # fmt: skip
def test_a_metric_near_a_constant_answers_is_marked(constant, marked, told):
    """The dense model's is 0.92, the compressed one's 0.8165."""
    made = report(**dict(zip(("constant", "constant_error"), constant, strict=True)) if constant else {})
    assert ("0.887 (chance) |" in markdown(made)) == marked
    assert ("the compressed model is at chance: dev accuracy 0.8165" in " ".join(score_lines(made))) == told


def test_a_row_of_the_table_has_no_empty_cell_and_no_row_without_a_difference():
    """Densities are in every column if they differ in one; a word of the code is in none."""
    shown = markdown(report())
    assert "| counting stored zeros | 0.9999 | 0.9999 | 0.9999 | 0.9999 |" in shown
    made = report()
    made["stages"]["prune"]["stored"] = made["stages"]["prune"]["density"]
    assert "| counting stored zeros | 0.9999 | 0.2461 | 0.9999 | 0.9999 |" in markdown(made)
    for net in made["stages"].values():
        net["stored"] = net["density"]
    assert "stored" not in markdown(made)
    assert not {"site", "non-embedding", "decompose", "p10"} & set(shown.replace("|", " ").split())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_is_plain_and_no_wider_than_a_screen(encoding, monkeypatch):
    """Also where it cannot hold every character."""
    made = report(data=splits(96, 67_349))
    made["compressed"]["interval"] = wilson(0.8165, 872)
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log, encoding=encoding, write_through=True))
    print_table(made)
    lines = log.getvalue().decode(encoding).splitlines()
    assert "\x1b" not in "".join(lines) and max(map(len, lines)) <= 100
    assert any("0.8165" in line and "872 rows" in line for line in lines)


def timed(monkeypatch, dense, small):
    """Return a report whose latency is that of nets with these times."""
    monkeypatch.setattr(reports, "forward_times", lambda nets, length: [dense, small])
    made = report()
    made["ratios"] = {}
    net = SimpleNamespace(config=BertConfig(), device=torch.device("cpu"))
    task = SimpleNamespace(length=23)
    made["timing"] = reports.add_latency([made["dense"], made["compressed"]], [net, net], task)
    return made


QUIET = [14.0, 14.2, 14.1, 14.3, 14.2, 14.0, 14.1, 14.4, 14.2, 14.1]
BUSY = [15.0, 28.0] * 5


def test_a_speed_up_is_named_if_the_spread_carries_it(monkeypatch):
    made = timed(monkeypatch, QUIET, [time / 2 for time in QUIET])
    assert made["dense"]["latency_ms"] == {
        "median": pytest.approx(14.15), "p10": 14.0, "p90": pytest.approx(14.31), "batch": 1, "length": 23, "threads": 1
    }  # fmt: skip
    assert made["timing"]["steady"] and made["timing"]["rounds"] == 10
    assert made["timing"]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0, "verdict": "faster"}
    assert speed_line(made) == "speed-up 2.00x (2.00-2.00)" and "| 2.00x |" in markdown(made)
    made = timed(monkeypatch, QUIET, QUIET[::-1])
    assert speed_line(made).startswith("speed-up within the noise; measure") and "| noise |" in markdown(made)


def test_table_and_line_agree_on_the_times_of_a_busy_machine(monkeypatch):
    """Rounds that slow both down alike say how much faster one is; others do not."""
    made = timed(monkeypatch, BUSY, [time / 2 for time in BUSY])
    assert not made["timing"]["steady"] and made["timing"]["spread"] == pytest.approx(28 / 15)
    assert speed_line(made) == "speed-up 2.00x (2.00-2.00)" and "| 2.00x |" in markdown(made)
    made = timed(monkeypatch, QUIET, BUSY)
    assert speed_line(made) == "speed-up too noisy; measure it with the command bench" and "| noise |" in markdown(made)


def test_the_table_is_of_the_program_that_is_shipped(capsys):
    """In integers its metric and bytes, and no time of PyTorch; of floats its bytes."""
    program = {"file": "model.onnx", "dtype": "int8", "metric": 0.8, "interval": [0.77, 0.83], "bytes": 120_000_000}
    made = report(program=program, timing={"speedup": {"median": 2.0, "low": 1.9, "high": 2.1}, "steady": True})
    lines = {line.split("|")[1].strip(): line for line in markdown(made).splitlines()}
    assert "| 0.8000 | 0.870 |" in lines["dev accuracy"]
    assert "| 437.96 | 120.00 | 0.274 |" in lines["MB on disk"] and "112.48 |  |" in lines["CPU latency ms, median"]
    print_table(made)
    said = capsys.readouterr().out
    assert "dev accuracy 0.8000 ± 0.0153 (872 of 872 rows)" in said and "speed-up" not in said
    made["program"] = {"file": "model.onnx", "difference": 1e-6, "bytes": 120_000_000}
    shown = markdown(made)
    assert "| 120.00 | 0.274 |" in shown and "| 0.8165 | 0.887 |" in shown and "| 112.48 | 2.00x |" in shown
