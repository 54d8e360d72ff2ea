"""Metrics against scipy and scikit-learn, over batches and degenerate inputs."""

import math
import random
from dataclasses import replace

import pytest
import torch
from answers import exact_match, token_f1
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from sklearn import metrics as reference

from lit_compress.evaluation.metrics import ROUGE, Perplexity, Rouge, Words, answer_scores, build_metrics
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

ALL_BINARY = replace(get_task("mrpc"), metrics=("accuracy", "f1", "macro_f1", "matthews"))

TRUE = [
    "The cats were running home .\nA dog barked at them .",
    "Rain is expected in the north",
    "He resigned on Monday .\nNobody had asked him to .\nThe party said little .",
]
WRITTEN = [
    "A dog was barking .\nCats run home .",
    "",
    "The party says nothing . On Monday he resigned .",
]


def _fed(task, logits, labels, batch=7):
    metrics = build_metrics(task)
    for start in range(0, len(labels), batch):
        metrics.update(logits[start : start + batch], labels[start : start + batch])
    return {name: value.item() for name, value in metrics.compute().items()}


def test_binary_scores_are_those_of_sklearn():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(101, 2, generator=generator), torch.randint(2, (101,), generator=generator)
    predicted = logits.argmax(-1)
    assert _fed(ALL_BINARY, logits, labels) == pytest.approx(
        {
            "accuracy": reference.accuracy_score(labels, predicted),
            "f1": reference.f1_score(labels, predicted),
            "macro_f1": reference.f1_score(labels, predicted, average="macro"),
            "matthews": reference.matthews_corrcoef(labels, predicted),
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


@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1]])
def test_rouge_is_the_mean_of_rouge_score(sizes):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    single = [scorer.score(true, text) for true, text in zip(TRUE, WRITTEN, strict=True)]
    metric, start = Rouge(), 0
    for size in sizes:
        metric.update(WRITTEN[start : start + size], TRUE[start : start + size])
        start += size
    found = metric.compute()
    assert set(found) == set(ROUGE)
    for name, value in found.items():
        assert float(value) == pytest.approx(sum(s[name].fmeasure for s in single) / 3, abs=1e-7)


def test_ranks_are_one_mean():
    """What two processes have seen, 1 and 2 texts, weighs by the text."""
    first, second, both = Rouge(), Rouge(), Rouge()
    first.update(WRITTEN[:1], TRUE[:1])
    second.update(WRITTEN[1:], TRUE[1:])
    both.update(WRITTEN, TRUE)
    first.merge_state(second)
    assert first.compute() == both.compute()


def test_nothing_seen():
    assert all(float(value) == 0 for value in Rouge().compute().values())


@pytest.mark.parametrize(
    ("true", "words"),
    [
        ("Слон пришёл, слон ушёл", ["слон", "пришёл", "слон", "ушёл"]),
        ("हिन्दी में लेख।", ["हिन्दी", "में", "लेख"]),
        ("2024年の猫。", ["2024", "年", "の", "猫"]),
        ("Über Zürich", ["ber", "z", "rich"]),  # as rouge_score has it
    ],
)
def test_rouge_reads_other_scripts(true, words):
    assert Words().tokenize(true) == words
    metric = Rouge()
    metric.update([true, true[: len(true) // 2]], [true, true])
    assert 0.5 < metric.compute()["rouge1"] < 1
    assert float(Perplexity().compute()) == math.inf


def test_perplexity_weighs_tokens():
    """Blocks of 1, 4 and 3 tokens in two batches, padded; what is not counted may be anything."""
    rows = [[2.0], [0.5, 1.5, 0.25, 3.0], [1.0, 0.0, 4.0]]
    expected = math.exp(sum(map(sum, rows)) / 8)
    metric = Perplexity()
    for part in (rows[:2], rows[2:]):
        width = 5
        losses = torch.tensor([row + [9.0] * (width - len(row)) for row in part])
        counted = torch.tensor([[i < len(row) for i in range(width)] for row in part])
        losses[0, -1] = torch.nan
        metric.update(losses, counted)
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)
    assert not metric.higher_is_better


PIECES = ["the", "The", "a", "an", "cat", "Cat's", "dog", "dogs,", "dog", "10.5", "U.S.", "naïve", "  ", "-", "theatre"]


def _texts(rng):
    return " ".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))


def test_answers_are_scored_as_by_plain_loops():
    rng = random.Random(0)
    answers = [_texts(rng) for _ in range(400)]
    truths = [[_texts(rng) for _ in range(rng.randint(1, 3))] for _ in answers]
    for answer, golds in zip(answers, truths, strict=True):
        assert answer_scores(answer, golds) == pytest.approx((exact_match(answer, golds), token_f1(answer, golds)))
    found = [sum(map(score, answers, truths)) / 400 for score in (exact_match, token_f1)]
    assert 0 < found[0] < found[1] < 1


def test_scores_without_an_answer():
    assert answer_scores("", []) == answer_scores("the", []) == (1.0, 1.0)
    assert answer_scores("cat", []) == answer_scores("", ["cat"]) == (0.0, 0.0)
