"""The order of documents: equal scores and scores below zero; loops are in tests/tasks/."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from lit_compress.evaluation.ranking_metrics import Ranking, Retrieval


def _mean(values):
    return pytest.approx(sum(values) / len(values), rel=1e-6)


def test_cosines_below_zero_find_documents():
    """The only relevant document is the first of all, at a cosine of -0.1."""
    query = torch.tensor([1.0, 0.0])
    first, second = torch.tensor([-0.1, 0.995]), torch.tensor([-0.9, 0.436])
    metric = Retrieval()
    metric.update(
        normalize(torch.stack([query, first, second]), dim=-1)[None], torch.tensor([[1, 2, 3]]), torch.arange(1)
    )
    assert {name: float(value) for name, value in metric.compute().items()} == {"ndcg_at_10": 1.0, "recall_at_10": 1.0}


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
    metric.update(torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long), torch.arange(4))
    assert float(metric.compute()["ndcg_at_10"]) == _mean([1 / math.log2(place + 1) for place in range(1, 5)])
