"""Metrics of vectors, and of the order of documents by vectors or by logits, over any batches and ranks.

nDCG is the mean over all orders of documents with equal scores, as in scikit-learn. For recall and the reciprocal rank,
documents with equal scores keep the order of the data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_recall, retrieval_reciprocal_rank

from lit_compress.evaluation.intervals import RowScores

TOP = 10


class TeacherCosine(RowScores):
    """The mean cosine of vectors of length 1 and those that a teacher gives the same texts."""

    names = ("teacher_cosine",)
    cosines: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch: vectors [b, texts, width] and the teacher's [b, texts * width]."""
        self.keep((preds * target.view(preds.shape).to(preds)).sum(-1).mean(1, keepdim=True).float())


class Retrieval(RowScores):
    """How well queries find their documents among all documents of the split, by cosine: nDCG@10 and recall@10.

    A query that is in several rows has several documents. Equal texts are one query or one document, so that the
    documents are all different texts of the split, those that are none of any query included.
    """

    names = ("ndcg_at_10", "recall_at_10")
    vectors: list[Tensor]
    texts: list[Tensor]
    rows: list[Tensor]

    def update(self, preds: Tensor, target: Tensor, index: Tensor) -> None:
        """Add one batch: vectors [b, texts, width]; int [b, texts], equal for equal texts; the rows' numbers [b]."""
        self.keep(preds.float(), target, index)

    def values(self) -> list[Tensor]:
        """Return the scores [queries, names] of all queries of all ranks."""
        if not (states := self.kept()):
            return []
        vectors, texts = _in_order(*states)
        queries, asks = texts[:, 0].unique(return_inverse=True)
        there = _by_appearance(texts[:, 1:])
        scores = _first(vectors[:, 0], asks, len(queries))
        scores = scores @ _first(vectors[:, 1:].flatten(0, 1), there.flatten(), int(there.max()) + 1).T
        wanted = torch.zeros(scores.shape, dtype=torch.bool)
        wanted[asks, there[:, 0]] = True
        pairs = list(zip(scores, wanted, strict=True))
        ndcg = [retrieval_normalized_dcg(some, right, top_k=TOP) for some, right in pairs]
        recall = [retrieval_recall(_ranked(some), right, top_k=TOP) for some, right in pairs]
        return [torch.stack([torch.stack(ndcg), torch.stack(recall)], 1)]


class Ranking(RowScores):
    """How well logits put the documents of every query in order: nDCG@10 and the reciprocal rank of the first relevant.

    Rows with the same query belong together. Queries none of whose documents is relevant are left out. For the
    reciprocal rank a document is relevant from 0.5 on; it is 0 if none of these is among the first ten.
    """

    names = ("ndcg_at_10", "mrr_at_10")
    logits: list[Tensor]
    relevance: list[Tensor]
    queries: list[Tensor]
    rows: list[Tensor]

    def update(self, preds: Tensor, target: Tensor, query: Tensor, index: Tensor) -> None:
        """Add one batch: logits [b] or [b, 1], relevances [b], numbers of the queries and of the rows, int [b] each."""
        self.keep(preds.detach().reshape(-1).float(), target.reshape(-1).float(), query.reshape(-1), index)

    def values(self) -> list[Tensor]:
        """Return the scores [queries, names] of all queries of all ranks."""
        if not (states := self.kept()):
            return []
        logits, relevance, queries = _in_order(*states)
        order, found = queries.argsort(stable=True), []
        sizes = queries[order].unique_consecutive(return_counts=True)[1].tolist()
        for rows in order.split(sizes):
            scores, wanted = logits[rows], relevance[rows]
            if wanted.any():
                first = retrieval_reciprocal_rank(_ranked(scores), wanted >= 0.5, top_k=TOP)
                found.append(torch.stack([retrieval_normalized_dcg(scores, wanted, top_k=TOP), first]))
        return [torch.stack(found)] if found else []


def _in_order(*states: Tensor) -> list[Tensor]:
    """Return states in the order of the data, by the last one, the numbers of their rows."""
    order = states[-1].argsort(stable=True)
    return [state[order] for state in states[:-1]]


def _by_appearance(texts: Tensor) -> Tensor:
    """Return the numbers of texts, of the same shape: 0 for the first, 1 for the next that is another, and so on."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts.flatten().tolist()]).view_as(texts)


def _ranked(scores: Tensor) -> Tensor:
    """Return scores [documents] in the same order that are all above 0 and differ; the first of equal ones is ahead.

    torchmetrics takes documents with scores of 0 and below as irrelevant in recall and reciprocal rank, and breaks ties
    in any order.
    """
    ranks = torch.empty_like(scores)
    ranks[scores.argsort(descending=True, stable=True)] = torch.arange(len(scores), 0, -1, dtype=scores.dtype)
    return ranks


def _first(vectors: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return for every number below ``count`` a vector [width] that has it."""
    placed = vectors.new_zeros(count, vectors.shape[-1])
    placed[numbers] = vectors
    return placed
