"""Vectors of texts: made of the states of tokens, as sentence-transformers names and computes it, and their losses.

In the losses only directions count, and vectors have length 1.

    match   1/n sum_i (1 - cos(s_i, t_i)) + 1/n^2 sum_ij (cos(s_i, s_j) - cos(t_i, t_j))^2   to a teacher's (V)
    scored  log(1 + sum over score_i > score_j of exp((cos_j - cos_i) / 0.05))                 CoSENT         (P)
    find    mean_i of -log softmax_j(cos(query_i, document_j) / 0.05) at the query's own       InfoNCE        (D)

(V): cosine distillation and, over a batch, the relations between its texts (Park et al. 2019, arXiv 1904.05068). (P)
looks at the order of the scores alone, as Spearman's correlation does, so that their scale does not matter
(CoSENTLoss of sentence-transformers). In (D) the documents of a batch are each other's wrong ones (van den Oord et al.
2018, arXiv 1807.03748); equal documents are never wrong. With several processes each compares the texts of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

POOLINGS = ("cls", "mean", "lasttoken")
SHARPNESS = 20.0  # 1 / 0.05, that of sentence-transformers


def pool(states: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return the vectors [rows, width] of texts, padded on either side.

    Args:
        states: [rows, tokens, width].
        mask: [rows, tokens], 1 at the tokens of the text, which are neighbours, and 0 at padding.
        name: one of ``POOLINGS``.
    """
    place = mask.cumsum(1) * mask  # 1, 2, ... at the tokens of a text
    count = mask.sum(1, keepdim=True)
    weights = {"cls": place == 1, "lasttoken": (place == count) & (mask != 0)}.get(name, mask)
    total = weights.sum(1, keepdim=True).clamp_min(1).to(states.dtype)
    return (states * weights.to(states.dtype)[..., None]).sum(1) / total


def match_loss(vectors: Tensor, target: Tensor) -> Tensor:
    """Return the distance (V) of ``vectors`` [..., width] from a teacher's, which get no gradient."""
    ours, theirs = vectors.flatten(0, -2), target.detach().flatten(0, -2)
    relations = (ours @ ours.T - theirs @ theirs.T).square().mean()
    return (1 - (ours * theirs).sum(-1)).mean() + relations


def vectors_loss(vectors: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of vectors [rows, texts, width] under labels, whose form tells their kind.

    Args:
        vectors: of the texts of every row.
        labels: float [rows, texts * width], a teacher's vectors (V); float [rows], scores of the pairs (P); or int
            [rows, texts], which text each is, of a query and its documents, the right one first (D).
    """
    if not labels.is_floating_point():
        return contrastive_loss(vectors, labels)
    if labels.ndim == 1:
        cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1)
        wrong = SHARPNESS * (cosines[None] - cosines[:, None])[labels[:, None] > labels[None]]
        return torch.cat([wrong.new_zeros(1), wrong]).logsumexp(0)
    return match_loss(vectors, labels.to(vectors.dtype).view(vectors.shape))


def contrastive_loss(vectors: Tensor, texts: Tensor) -> Tensor:
    """Return (D) of vectors [rows, texts, width]: a query, its document, and documents that are none of it.

    Numbers ``texts``, int [rows, texts], are equal where texts are.
    """
    rows, documents = len(vectors), vectors.shape[1] - 1
    cosines = SHARPNESS * vectors[:, 0] @ vectors[:, 1:].flatten(0, 1).T
    own = torch.arange(rows, device=vectors.device) * documents
    same = texts[:, 1, None] == texts[:, 1:].flatten()
    same[torch.arange(rows, device=own.device), own] = False
    return F.cross_entropy(cosines.masked_fill(same, -torch.inf), own)
