"""The order of documents: scores of any sign, equal scores, rows in any order of batches; against loops."""

import math
import random

import pytest
import torch
from torch.nn.functional import normalize

from lit_compress.evaluation.ranking_metrics import Ranking, Retrieval


def _ranks(scores, right):
    """Return the places of the relevant documents, from 1 on, by a loop; the first of equal scores is ahead."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [place for place, document in enumerate(order, 1) if document in right]


def _expected(scores, right):
    """Return nDCG@10 (of scores that differ), recall@10 and the reciprocal rank of a query."""
    places = _ranks(scores, right)
    top = [place for place in places if place <= 10]
    best = sum(1 / math.log2(place + 1) for place in range(1, min(10, len(right)) + 1))
    return (
        sum(1 / math.log2(place + 1) for place in top) / best, len(top) / len(right), 1 / top[0] if top else 0.0,
    )  # fmt: skip


def _mean(values):
    return pytest.approx(sum(values) / len(values), rel=1e-6)


@pytest.mark.parametrize("shift", [0.0, -5.0, 5.0, -1e4])
def test_logits_of_any_sign_give_the_same_order(shift):
    rng, rows = random.Random(1), []
    for query in range(30):
        rows += [(query, rng.gauss(0, 1), float(rng.random() < 0.15)) for _ in range(rng.randint(2, 30))]
    metric, expected = Ranking(), []
    queries, logits, relevance = (torch.tensor(column) for column in zip(*rows, strict=True))
    metric.update(logits + shift, relevance, queries)
    for query in range(30):
        own = [row[1:] for row in rows if row[0] == query]
        if right := {i for i, (_, label) in enumerate(own) if label}:
            scores = (torch.tensor([score for score, _ in own]) + shift).tolist()
            expected.append(_expected(scores, right))
    found = metric.compute()
    assert float(found["mrr_at_10"]) == _mean([each[2] for each in expected])
    if shift > -1e4:  # there float32 makes some scores equal
        assert float(found["ndcg_at_10"]) == _mean([each[0] for each in expected])


def test_cosines_below_zero_find_documents():
    """The only relevant document is the first of all, at a cosine of -0.1; and random vectors against a loop."""
    query = torch.tensor([1.0, 0.0])
    first, second = torch.tensor([-0.1, 0.995]), torch.tensor([-0.9, 0.436])
    metric = Retrieval()
    metric.update(normalize(torch.stack([query, first, second]), dim=-1)[None], torch.tensor([[1, 2, 3]]))
    assert {name: float(value) for name, value in metric.compute().items()} == {"ndcg_at_10": 1.0, "recall_at_10": 1.0}

    generator = torch.Generator().manual_seed(0)
    documents = normalize(torch.rand(40, 3, generator=generator), dim=-1)
    queries = -documents.roll(7, 0)
    metric = Retrieval()
    metric.update(torch.stack([queries, documents], 1), torch.arange(80).view(40, 2))
    scores = (queries @ documents.T).tolist()
    expected = [_expected(scores[i], {i}) for i in range(40)]
    assert all(value < 0 for row in scores for value in row) and 0 < sum(each[1] for each in expected) < 40
    found = metric.compute()
    assert float(found["ndcg_at_10"]) == _mean([each[0] for each in expected])
    assert float(found["recall_at_10"]) == _mean([each[1] for each in expected])


def test_equal_scores_keep_the_order_of_the_data_however_rows_are_batched():
    """Documents 10, 11, ... of a query all have the same score: recall finds the first ten, and rank 1 is row 0."""
    for rows in (torch.arange(24), torch.arange(23, -1, -1), torch.randperm(24)):
        ranking = Ranking()
        relevance = torch.zeros(24)
        relevance[[2, 15]] = 1.0
        for some in rows.split(7):
            ranking.update(torch.zeros(len(some)), relevance[some], torch.zeros(len(some), dtype=torch.long), some)
        assert float(ranking.compute()["mrr_at_10"]) == pytest.approx(1 / 3)

        retrieval, numbers = Retrieval(), torch.stack([torch.arange(24) + 50, 100 - torch.arange(24)], 1)
        numbers[:, 0] = 7  # one query that asks for all documents but those of rows 4 to 23
        numbers[4:, 0] = 8
        vectors = normalize(torch.ones(24, 2, 4), dim=-1)
        for some in rows.split(5):
            retrieval.update(vectors[some], numbers[some], some)
        recall = [4 / 4, 6 / 20]  # the ten documents of the first ten rows are found by both
        assert float(retrieval.compute()["recall_at_10"]) == _mean(recall)


def test_ndcg_of_equal_scores_is_the_mean_over_their_orders():
    """A net whose scores are all the same has no perfect order, even if the relevant document is the first row."""
    metric = Ranking()
    metric.update(torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    assert float(metric.compute()["ndcg_at_10"]) == _mean([1 / math.log2(place + 1) for place in range(1, 5)])
