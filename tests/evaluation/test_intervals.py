"""Intervals of scores against their definitions and naive loops."""

import math

import pytest
import torch

from lit_compress.evaluation.intervals import bootstrap, intervals, wilson
from lit_compress.evaluation.metrics import CONFUSION_SCORES, Confusion, build_metrics
from lit_compress.tasks.records import TASKS


@pytest.mark.parametrize(("right", "rows"), [(0, 10), (10, 10), (37, 40), (800, 872), (1, 2)])
def test_wilson_solves_its_equation(right, rows):
    """Its ends are the p with (right / rows - p)^2 = 1.96^2 p (1 - p) / rows."""
    for p in wilson(right / rows, rows):
        assert 0 <= p <= 1
        assert (right / rows - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / rows, abs=1e-6)


def test_bootstrap_of_a_mean_is_near_its_standard_error():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = float(values.std() / 400**0.5)
    found, again = (bootstrap(lambda rows: {"mean": values[rows].mean()}, 400) for _ in range(2))
    low, high = found["mean"]
    assert low == pytest.approx(float(values.mean()) - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(float(values.mean()) + 1.96 * error, abs=0.3 * error)
    assert found == again  # the same draws every time


def test_scores_of_a_table_with_an_absent_class_and_without_any_variation():
    for classes, labels, matthews in ((3, [0] * 5 + [2] * 5, 1), (2, [0] * 9, 0)):
        scores = Confusion(classes, CONFUSION_SCORES).scores(torch.tensor(labels), torch.tensor(labels))
        assert float(scores["macro_f1"]) == 1 and float(scores["matthews"]) == pytest.approx(matthews)


def observed(task, *batches):
    metrics = build_metrics(TASKS[task])
    for batch in batches:
        metrics.update(*batch)
    return metrics


def test_what_has_an_interval():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (50,), generator=generator)
    logits = torch.randn(50, 2, generator=generator)
    for task, batch, names in (
        ("mrpc", (logits, labels), {"accuracy", "f1"}),
        ("stsb", (logits[:, 0] + 2 * labels, labels.float()), {"pearson_spearman", "pearson", "spearman"}),
        ("xsum", (["a b", "c"], ["a b", "d"]), {"rouge1", "rouge2", "rougeL", "rougeLsum"}),
        ("cola", (logits, labels), {"matthews"}),
    ):
        metrics = observed(task, batch)
        values = {name: float(value) for name, value in metrics.compute().items()}
        found = intervals(metrics, values, len(batch[1]))
        assert set(found) == names and all(low <= values[name] <= high for name, (low, high) in found.items())
        assert task != "mrpc" or found["accuracy"] == wilson(values["accuracy"], 50)


def test_what_has_none():
    metrics = observed("wikitext2", (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)))
    assert intervals(metrics, {"perplexity": math.e}, 1) == {}
    assert intervals(build_metrics(TASKS["sst2"]), {"accuracy": 0.0}, 0) == {}
