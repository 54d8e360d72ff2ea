"""What is printed of an export: a program of 8-bit integers that has lost what the float one has is told."""

from __future__ import annotations

import warnings

import pytest

from lit_compress.cli.fitting import print_choices

KINDS = ("structures", "components", "blocks")


def report(metric, before, interval=(0.5, 0.6), mode="max", name="ndcg_at_10"):
    return {
        "vocabulary": None, "embeddings": None,
        "metric": {"name": name, "mode": mode}, "compressed": {"metric": before},
        "program": {"dtype": "int8", "file": "model.onnx", "bytes": 1000, "metric": metric, "interval": interval},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"metric": 0.6731, "before": 1.0},
         "int8 loses the metric (dev ndcg_at_10 0.6731, in float 1.0000); leave --dtype int8 out"),
        ({"metric": float("nan"), "before": 0.5}, "int8 loses the metric (dev ndcg_at_10 nan"),
        ({"metric": 0.55, "before": 0.58}, "int8 loses the metric"),  # a standard error is 0.0255
        ({"metric": 20.3, "before": 20.0, "interval": None, "mode": "min"}, "int8 loses the metric"),
    ],
)  # fmt: skip
def test_a_program_that_lost_is_told(values, words, capsys):
    with pytest.warns(UserWarning) as told:
        print_choices(report(**values))
    assert words in str(told[0].message)
    assert capsys.readouterr().out.startswith(f"model.onnx: int8, 1,000 bytes, dev ndcg_at_10 {values['metric']:.4f}")


@pytest.mark.parametrize(
    "values",
    [
        {"metric": 0.55, "before": 0.57},
        {"metric": 0.6, "before": 0.5},
        {"metric": 20.1, "before": 20.0, "interval": None, "mode": "min"},
        {"metric": 19.0, "before": 20.0, "interval": None, "mode": "min"},
        {"metric": 0.995, "before": 1.0, "interval": (0.994, 0.996), "name": "teacher_cosine"},
    ],
)
def test_a_program_that_lost_nothing_is_not(values, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        print_choices(report(**values))
    said, name = capsys.readouterr().out, values.get("name", "ndcg_at_10")
    assert said.startswith(f"model.onnx: int8, 1,000 bytes, dev {name} {values['metric']:.4f}")


def test_a_vocabulary_that_was_cut_is_told(capsys):
    counts = {"rows": 900, "of": 3000, "inputs": 160, "changed": 0, "dev_inputs": 20, "dev_changed": 7}
    print_choices(report(0.84, 0.84) | {"vocabulary": counts})
    assert "0 of 160 training inputs and 7 of 20 dev inputs have other pieces now\n" in capsys.readouterr().out
    other = {"name": "perplexity", "mode": "min"}
    print_choices(report(0.84, 0.84) | {"vocabulary": counts, "metric": other, "program": None})
    assert "have other pieces now: their perplexity is of other pieces, so it" in capsys.readouterr().out
