"""Hard-concrete gates: learned relaxed 0-1 variables.

Louizos, Welling, Kingma 2018, "Learning Sparse Neural Networks through L0 Regularization",
https://arxiv.org/abs/1712.01312, with the constants of CoFi (Xia et al. 2022) and SP3. With a = log_alpha,
u ~ U(EPS, 1 - EPS), LOWER = -0.1, UPPER = 1.1, TEMPERATURE = 2/3:

    s = sigmoid((log u - log(1 - u) + a) / TEMPERATURE);  z = clamp(LOWER + (UPPER - LOWER) s, 0, 1)
    P(z > 0) = sigmoid(a - TEMPERATURE log(-LOWER / UPPER))

A gate has a grid of units, [groups, size]: heads by layer, neurons by layer, hidden dimensions in one group. Each group
keeps its own units, those with the largest a. Everything is computed in float32, also under autocast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_compress.utils.devices import double

LOWER, UPPER, TEMPERATURE, EPS = -0.1, 1.1, 2 / 3, 1e-6
SHIFT = -TEMPERATURE * math.log(-LOWER / UPPER)  # P(z > 0) = sigmoid(a + SHIFT)


def sample(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return gates z in [0, 1], differentiable in ``log_alpha``, in the shape of ``uniform``, draws from U(0, 1)."""
    u = uniform.clamp(EPS, 1 - EPS)
    s = ((u.log() - torch.log1p(-u) + log_alpha) / TEMPERATURE).sigmoid()
    return (LOWER + (UPPER - LOWER) * s).clamp(0, 1)


def probability(log_alpha: Tensor) -> Tensor:
    """Return P(z > 0), clamped to [EPS, 1 - EPS]; there it has no gradient."""
    return (log_alpha + SHIFT).sigmoid().clamp(EPS, 1 - EPS)


def soft(log_alpha: Tensor) -> Tensor:
    """Return the deterministic value of a gate that is kept: sigmoid(0.8 a / TEMPERATURE)."""
    return (0.8 / TEMPERATURE * log_alpha).sigmoid()


def kept_units(log_alpha: Tensor, least: int = 0, offset: float = 0.0) -> Tensor:
    """Return how many units every group keeps, int64 [groups]: floor(sum P(z > 0) + 1/2), 1 of 1 iff P >= 1/2.

    Args:
        log_alpha: [groups, size].
        least: number of units that a group always keeps.
        offset: added to ``log_alpha``; moves all groups together.
    """
    expected = (double(log_alpha) + (offset + SHIFT)).sigmoid().sum(1)
    return (expected + 0.5).floor().long().clamp(least, log_alpha.shape[1]).to(log_alpha.device)


def keep_best(log_alpha: Tensor, kept: Tensor) -> Tensor:
    """Return which ``kept`` units [groups] have the largest log_alpha, bool [groups, size]; of equal ones the first."""
    order = log_alpha.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1) < kept[:, None]  # a unit's place in the order
