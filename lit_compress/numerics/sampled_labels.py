"""Losses whose gradients make up the Fisher information: labels drawn from the model's outputs, or exact.

The Fisher information of an example is E[g g^T], g the gradient of -log p(label), over labels that follow the model's
own distribution; with true labels it is the empirical one, which vanishes where the model fits its training data
(second-order compression, section 1). With a softmax of two classes the expectation takes one backward pass as well,

    sum_c p_c g_c g_c^T = J^T (diag(p) - p p^T) J = (J^T r) (J^T r)^T,    J = d logits / d parameters               (E)

with r = sqrt(p_0 p_1) (1, -1).

A model that gives vectors f, of length 1, has no distribution of its own. It gets the one that a regression has, a
normal distribution around its output, y ~ N(f, I). With y = f + e, e ~ N(0, I),

    -log p(y) = |y - f|^2 / 2 + const,   g = -J^T e,   E[g g^T] = J^T J,   J = d f / d parameters                   (N)

which is the Hessian of |f - f'|^2 / 2 = 1 - cos(f, f'), the cosine distance to this model: the K-FAC estimate of the
added loss estimates the distance from its own vectors, and needs no label.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_compress.numerics.losses import NUMBERS, LossKind, task_loss
from lit_compress.utils.devices import double

Labels = Literal["drawn", "exact"]

POSITIONS = 64  # whose distributions, of float64, are in memory at a time


def fisher_loss(
    logits: Tensor,
    kind: LossKind,
    choice: Labels,
    *,
    counted: Tensor | None = None,
    index: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Return a scalar, a sum over the examples, whose gradients g give every example's part g g^T of the Fisher.

    The loss of an example is its negative log-likelihood, the sum over all labels it has. A regression is a normal
    distribution of variance 1: the gradient of the output itself. The logit of a relevance also counts as one: as a
    probability, documents that are surely relevant, or surely not, would hardly count.

    Args:
        logits: [b, ..., classes], or [b] or [b, 1] for a regression or relevance.
        choice: ``drawn``: one draw per distribution; ``exact``: the expectation, for one distribution of two classes
            per example.
        counted: bool [b, ...], which distributions have a label; None for all.
        index: int [b], number of every example, for ``drawn``.
    """
    if kind == "vectors":
        assert choice == "drawn" and index is not None
        return (logits * draw_noise(logits, index, seed)).sum()
    if kind in NUMBERS:
        return logits.sum()
    if choice == "exact":
        assert logits.ndim == 2
        return (logits * softmax_fisher_root(logits.detach().softmax(-1))).sum()
    assert choice == "drawn" and index is not None, choice
    labels = draw_labels(logits, index, seed)
    return task_loss(logits, labels if counted is None else labels.masked_fill(~counted, -100), kind, "none").sum()


@torch.no_grad()
def draw_labels(logits: Tensor, index: Tensor, seed: int = 0) -> Tensor:
    """Return classes, int64 [b, ...], drawn from every softmax(logits), at most ``POSITIONS`` of them at a time.

    The draw at a position of an example depends on the seed, the example's number ``index`` [b], the position and the
    distribution, but not on the batch, its order or padding at the right. Logits are [b, ..., classes].
    """
    shape, drawn = logits.shape[:-1], []
    for row, number in enumerate(index.tolist()):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        uniform = torch.rand(shape[1:].numel(), 1, generator=generator, dtype=torch.float64)
        parts = logits[row].reshape(-1, logits.shape[-1]).split(POSITIONS)
        drawn += [_drawn(*pair) for pair in zip(parts, uniform.split(POSITIONS), strict=True)]
    return torch.cat(drawn).view(shape)


def _drawn(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return the class [n] at the quantile ``uniform`` [n, 1], float64, of every softmax of ``logits`` [n, classes]."""
    summed = double(logits).softmax(-1).cumsum(-1)
    chosen = torch.searchsorted(summed, uniform.to(summed.device) * summed[:, -1:], right=True)
    return chosen[:, 0].clamp_max(logits.shape[-1] - 1).to(logits.device)


@torch.no_grad()
def draw_noise(vectors: Tensor, index: Tensor, seed: int = 0) -> Tensor:
    """Return normal numbers of the shape of ``vectors`` [b, ...], by the seed and the examples' numbers [b] alone."""
    drawn = []
    for row, number in zip(vectors, index.tolist(), strict=True):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
        drawn.append(torch.randn(row.shape, generator=generator, dtype=torch.float64))
    return torch.stack(drawn).to(vectors)


def softmax_fisher_root(probabilities: Tensor) -> Tensor:
    """Return r [b, 2] with r r^T = diag(p) - p p^T, equation (E), of probabilities p [b, 2] of two classes."""
    assert probabilities.shape[-1] == 2, probabilities.shape
    p = double(probabilities)
    root = (p.prod(-1, keepdim=True) / p.sum(-1, keepdim=True)).sqrt()
    return torch.cat([root, -root], -1).to(probabilities)
