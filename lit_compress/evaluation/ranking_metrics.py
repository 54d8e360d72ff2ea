"""Metrics of the order of documents, by vectors or by logits: correct over any number of batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_recall, retrieval_reciprocal_rank
from torchmetrics.utilities import dim_zero_cat

TOP = 10
NAMES = ("ndcg_at_10", "recall_at_10")


class Retrieval(Metric):
    """How well queries find their documents among all documents of the split, by cosine: nDCG@10 and recall@10.

    A query that stands in several rows has several documents. Equal texts are one query or one document, so that the
    documents are all different texts of the split, those that are none of any query included.
    """

    full_state_update = False
    higher_is_better = True
    vectors: list[Tensor]
    texts: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("vectors", default=[], dist_reduce_fx="cat")
        self.add_state("texts", default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch: vectors [b, texts, width] of queries, their documents and others; int [b, texts], which."""
        self.vectors.append(preds.float())
        self.texts.append(target)

    def values(self) -> dict[str, Tensor]:
        """Return the scores [queries] by name, of all queries of all ranks."""
        if not len(self.vectors):
            return dict.fromkeys(NAMES, torch.zeros(0))
        vectors, texts = dim_zero_cat(self.vectors).cpu(), dim_zero_cat(self.texts).cpu()
        queries, asks = texts[:, 0].unique(return_inverse=True)
        documents, there = texts[:, 1:].unique(return_inverse=True)
        scores = _first(vectors[:, 0], asks, len(queries))
        scores = scores @ _first(vectors[:, 1:].flatten(0, 1), there.flatten(), len(documents)).T
        wanted = torch.zeros(scores.shape, dtype=torch.bool)
        wanted[asks, there[:, 0]] = True
        pairs = list(zip(scores, wanted, strict=True))
        functions = zip(NAMES, (retrieval_normalized_dcg, retrieval_recall), strict=True)
        return {name: torch.stack([score(a, b, top_k=TOP) for a, b in pairs]).double() for name, score in functions}

    def compute(self) -> dict[str, Tensor]:
        """Return the means over the queries; 0 without any."""
        return _means(self.values(), self.device)


class Ranking(Metric):
    """How well logits put the documents of every query in order: nDCG@10 and the reciprocal rank of the first relevant.

    Rows with the same query belong together. Queries none of whose documents is relevant are left out. For the
    reciprocal rank a document is relevant from 0.5 on; it is 0 where none of these is among the first ten.
    """

    full_state_update = False
    higher_is_better = True
    logits: list[Tensor]
    relevance: list[Tensor]
    queries: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("logits", "relevance", "queries"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, queries: Tensor) -> None:
        """Add one batch: logits [b] or [b, 1], relevances [b] from 0 to 1, int [b], which query."""
        self.logits.append(preds.detach().reshape(-1).float())
        self.relevance.append(target.reshape(-1).float())
        self.queries.append(queries.reshape(-1))

    def values(self) -> dict[str, Tensor]:
        """Return the scores [queries] by name, of all queries of all ranks."""
        found: dict[str, list[Tensor]] = {"ndcg_at_10": [], "mrr_at_10": []}
        if len(self.logits):
            logits, relevance, queries = (dim_zero_cat(v).cpu() for v in (self.logits, self.relevance, self.queries))
            order = queries.argsort(stable=True)
            sizes = queries[order].unique_consecutive(return_counts=True)[1].tolist()
            for rows in order.split(sizes):
                scores, wanted = logits[rows], relevance[rows]
                if wanted.any():
                    found["ndcg_at_10"].append(retrieval_normalized_dcg(scores, wanted, top_k=TOP))
                    found["mrr_at_10"].append(retrieval_reciprocal_rank(scores, wanted >= 0.5, top_k=TOP))
        return {name: torch.stack(some).double() if some else torch.zeros(0) for name, some in found.items()}

    def compute(self) -> dict[str, Tensor]:
        """Return the means over the queries; 0 without any."""
        return _means(self.values(), self.device)


def _means(scores: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the mean of every score; 0 without any."""
    found = {name: values.mean() if len(values) else torch.zeros(()) for name, values in scores.items()}
    return {name: value.float().to(device) for name, value in found.items()}


def _first(vectors: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return for every number below ``count`` a vector [width] that has it."""
    found = vectors.new_zeros(count, vectors.shape[-1])
    found[numbers] = vectors
    return found
