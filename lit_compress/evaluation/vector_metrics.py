"""Metrics of vectors of texts: correct over any number of batches and ranks. All vectors here have length 1."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_recall
from torchmetrics.utilities import dim_zero_cat

TOP = 10
NAMES = ("ndcg_at_10", "recall_at_10")


class TeacherCosine(Metric):
    """The mean cosine of vectors and those that a teacher gives the same texts."""

    full_state_update = False
    higher_is_better = True
    cosines: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("cosines", default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch: vectors [b, texts, width] and the teacher's [b, texts * width]."""
        self.cosines.append((preds * target.view(preds.shape).to(preds)).sum(-1).mean(1).float())

    def values(self) -> Tensor:
        """Return the cosines of all rows of all ranks."""
        return dim_zero_cat(self.cosines).double().cpu() if len(self.cosines) else torch.zeros(0)

    def compute(self) -> Tensor:
        """Return their mean; 0 without any."""
        found = self.values()
        return (found.mean() if len(found) else torch.zeros(())).float().to(self.device)


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
        found = {name: values.mean() if len(values) else torch.zeros(()) for name, values in self.values().items()}
        return {name: value.float().to(self.device) for name, value in found.items()}


def _first(vectors: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return for every number below ``count`` a vector [width] that has it."""
    found = vectors.new_zeros(count, vectors.shape[-1])
    found[numbers] = vectors
    return found
