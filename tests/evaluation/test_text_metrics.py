"""ROUGE is that of rouge_score, perplexity that of all tokens; however they are batched."""

import math

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from lit_compress.evaluation.text_metrics import ROUGE, Perplexity, Rouge

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
