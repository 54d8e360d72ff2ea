"""Metrics against scipy and scikit-learn, over batches and degenerate inputs."""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from sklearn import metrics as reference

from lit_compress.evaluation.metrics import build_metrics
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

ALL_BINARY = replace(get_task("mrpc"), metrics=("accuracy", "f1", "macro_f1", "matthews"))


def _fed(task, logits, labels, batch=7, prefix=""):
    metrics = build_metrics(task, prefix)
    for start in range(0, len(labels), batch):
        metrics.update(logits[start : start + batch], labels[start : start + batch])
    return {name: value.item() for name, value in metrics.compute().items()}


def test_binary_scores_are_those_of_sklearn():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(101, 2, generator=generator), torch.randint(2, (101,), generator=generator)
    predicted = logits.argmax(-1)
    assert _fed(ALL_BINARY, logits, labels, prefix="val/") == pytest.approx(
        {
            "val/accuracy": reference.accuracy_score(labels, predicted),
            "val/f1": reference.f1_score(labels, predicted),
            "val/macro_f1": reference.f1_score(labels, predicted, average="macro"),
            "val/matthews": reference.matthews_corrcoef(labels, predicted),
        },
        abs=1e-6,
    )


@pytest.mark.parametrize("shape", [(200,), (200, 1)])
def test_correlations_are_those_of_scipy_with_ties(shape):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 26, (200,), generator=generator) / 5
    predicted = (labels + torch.randn(200, generator=generator)).round(decimals=1)
    pearson, spearman = stats.pearsonr(predicted, labels)[0], stats.spearmanr(predicted, labels)[0]
    assert _fed(get_task("stsb"), predicted.reshape(shape), labels) == pytest.approx(
        {"pearson": pearson, "spearman": spearman, "pearson_spearman": (pearson + spearman) / 2}, abs=1e-5
    )


@pytest.mark.parametrize("labels", [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_constant_predictions_score_zero_not_nan(labels):
    constant = torch.tensor([[0.0, 1.0]] * 4)
    assert _fed(get_task("cola"), constant, torch.tensor(labels)) == {"matthews": 0.0}
    ratings = torch.tensor(labels, dtype=torch.float)
    assert set(_fed(get_task("stsb"), torch.full((4,), 2.5), ratings).values()) == {0.0}
    assert set(_fed(get_task("stsb"), torch.arange(4.0), torch.full((4,), 1.0)).values()) == {0.0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", [ALL_BINARY, get_task("stsb")], ids=lambda task: task.name)
def test_nothing_seen_scores_zero(task):
    assert {value.item() for value in build_metrics(task).compute().values()} == {0.0}


def test_an_unknown_metric_is_one_line():
    with pytest.raises(UserError, match=r"^task 'sst2': unknown metric 'acuracy'; did you mean 'accuracy'\?$"):
        build_metrics(replace(get_task("sst2"), metrics=("acuracy",)))
