"""Bases of hidden states and heads from their second moments: PCA, and DRONE's form for queries and keys (SP3).

Hu et al. 2024, "SP3: Enhancing Structured Pruning via PCA Projection", sections 3.1 and A. Everything is float64 on the
CPU; W is torch's weight, y = W x. With R = I - 11^T / d, the projector that removes a token's mean over its features,
LN(x) = gamma * norm(R x) + beta, and norm(v) = v / sqrt(|v|^2 / d + eps) commutes with every orthogonal U:

    LN(x) = P_out norm(P_in x) + beta,    P_in = U^T R,    P_out = diag(gamma) U
    Q/K     P_Q = S^1/2 U_Z^T S_1^-1 U_1^T,  P_K = S^1/2 V_Z^T S_2^-1 U_2^T,  S_1 U_1^T U_2 S_2 = U_Z S V_Z^T
    V/O     P_V = U^T,  P_O = U

so that P_Q^T P_K = I = P_O P_V and nothing changes, whatever the data. The paper prints norm with d for sqrt(d), V_Z
for V_Z^T (Eq. 11) and P_O^T for P_O (Eq. 13); only these forms are identities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_compress.utils.errors import UserError

RIDGE = 1e-6  # share of the mean eigenvalue that is added to all


def principal_axes(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors U [..., d, d] of a Gram matrix, as columns, and their eigenvalues [..., d], falling.

    The entry of largest absolute value in every axis is positive, so that the same matrix always gives the same axes.
    ``gram`` is a sum of x x^T, [d, d] or [heads, d, d]; results are float64, on the CPU.

    Raises:
        UserError: the matrix is not finite.
    """
    gram = gram.detach().cpu().double()
    if not gram.isfinite().all():
        raise UserError("calibration: activations are inf or NaN; give a model with finite outputs on this data")
    values, axes = torch.linalg.eigh((gram + gram.mT) / 2)
    values, axes = values.flip(-1), axes.flip(-1)
    largest = axes.gather(-2, axes.abs().argmax(-2, keepdim=True))
    return axes * torch.where(largest < 0, -1.0, 1.0), values.clamp_min(0)


def centred_axes(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the principal axes U [d, d] of inputs without their mean over the features, and their energies, falling.

    Each entry of the last axis is 1 / sqrt(d); it has no energy. ``gram`` is the sum of x x^T over tokens, or of (R
    x)(R x)^T.
    """
    d = gram.shape[-1]
    gram = gram.detach().cpu().double()
    gram = gram - gram.mean(0, keepdim=True)
    gram = gram - gram.mean(1, keepdim=True)  # R gram R
    scale = gram.trace().clamp_min(torch.finfo(torch.float64).tiny)
    # the direction 1 / sqrt(d) gets an eigenvalue below all others
    axes, values = principal_axes(gram / scale - torch.full_like(gram, 1 / d))
    return axes, values * scale


def site_projections(axes: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return P_in = U^T R and P_out = diag(gamma) U, both [d, d]; ``axes`` is U, ``gamma`` [d] a norm's weight."""
    axes = axes.double()
    return axes.mT - axes.mean(0)[:, None], gamma.detach().to(axes)[:, None] * axes


def query_key_projections(gram_query: Tensor, gram_key: Tensor) -> tuple[Tensor, Tensor]:
    """Return P_Q and P_K [d, d] of one head's queries and keys, rows by their part in the attention scores, falling.

    The first k rows of both give the best approximation of rank k of X_Q^T X_K (Chen et al. 2021, DRONE). The ridge
    keeps P_Q^T P_K = I for heads of any rank; it only changes the order of directions without data.

    Args:
        gram_query: sum of q q^T over tokens, [d, d]; with the bias.
        gram_key: sum of k k^T, [d, d]; the tokens may be others.
    """
    (axes_q, root_q), (axes_k, root_k) = _root(gram_query), _root(gram_key)
    left, sigma, right = torch.linalg.svd(root_q[:, None] * (axes_q.mT @ axes_k) * root_k)
    half = sigma.sqrt()[:, None]
    query = half * (left.mT / root_q) @ axes_q.mT
    key = half * (right / root_k) @ axes_k.mT
    return query, key


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the axes, and the square roots of the eigenvalues plus ridge, all above 0."""
    axes, values = principal_axes(gram)
    mean = float(values.mean())
    return axes, (values + RIDGE * mean).sqrt() if mean else torch.ones_like(values)
