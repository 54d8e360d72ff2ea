"""Factorization of one matrix, W -> left, right, by plain or weighted SVD.

Everything is computed in float64 on the CPU; results have the dtype and device of W.

All methods use one function: a truncated SVD of W weighted by an importance per row or column, without any
inverse. For rows, with D = diag(d) and D W = U S V^T, the papers' D^-1 U_k S_k is exactly W V_k; for columns,
with W D = U S V^T, the right factor is exactly U_k^T W. So only an orthonormal basis is needed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_compress.utils.errors import UserError

Side = Literal["out", "in", "balanced"]

RELATIVE_FLOOR = 1e-4  # fraction of the mean multiplier: keeps D W of full rank, so that a full-rank product is W
GRAM_FROM = 4096  # if both sides are at least this, eigenvectors of the Gram matrix replace the SVD


@dataclass(frozen=True)
class Factorization:
    """The best low-rank approximations of a matrix, or of several stacked by rows, under a weighted error.

    Attributes:
        sigma: float64 [min(out, in)], falling: leaving out component j adds sigma_j^2 to the squared error.
        left: float64 [out, components], on the CPU.
        right: float64 [components, in].
        dtype: of results.
        device: of results.
        mean: mean [in] of the inputs that the bias takes over; None if it stays.
    """

    sigma: Tensor
    left: Tensor
    right: Tensor
    dtype: torch.dtype
    device: torch.device
    name: str
    mean: Tensor | None = None

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the best approximation of that rank, contiguous."""
        assert 1 <= rank <= len(self.right), (self.name, rank, len(self.right))
        left, right = self.left[:, :rank], self.right[:rank]
        return tuple(factor.to(self.device, self.dtype).contiguous() for factor in (left, right))  # type: ignore


@torch.no_grad()
def weighted_svd(
    weight: Tensor,
    importance: Tensor | None = None,
    side: Side = "out",
    *,
    name: str = "weight",
    components: int | None = None,
) -> Factorization:
    """Decompose W under an importance of its rows or its columns, for the factors of any rank.

    A rank's factors minimise || diag(d) (W - left @ right) ||_F for ``side="out"`` (LPAF Eqs. 7-11) and || (W - left @
    right) diag(d) ||_F for ``side="in"`` (FWSVD, whose rows are torch's columns). d is the square root of the
    importance, floored at 1e-4 of its mean; its scale has no influence. sigma are the singular values of the weighted
    W, in the importance's own scale, so that values of several matrices compare; 0 if an importance is all zero.

    Args:
        weight: [out, in], any float dtype.
        importance: [out] or [in], not negative; None for the plain SVD.
        side: whether the importance belongs to rows (``out``) or columns (``in``). That side's factor, left or right,
            gets the singular values; ``balanced``, for the plain SVD: both get their square roots.
        name: name of the matrix in messages.
        components: number of components to keep; default: all.

    Raises:
        UserError: the weight holds inf or NaN.

    Warns:
        UserWarning: the importance is all zero, negative or not finite; it counts as constant.
    """
    wide = weight.detach().to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise UserError(f"{name}: holds inf or NaN and cannot be factorized; valid: finite weights")
    scale, mean = _multiplier(importance, f"{name}: importance of {'rows' if side == 'out' else 'columns'}")
    scaled = wide if scale is None else scale[:, None] * wide if side == "out" else wide * scale
    basis, sigma = _right_basis(scaled.T if side == "in" else scaled, components or min(wide.shape))
    left, right = (basis, basis.T @ wide) if side == "in" else (wide @ basis, basis.T)
    if side == "balanced":
        share = torch.linalg.vector_norm(left, dim=0).sqrt()
        left, right = torch.where(share > 0, left / share, 0.0), share[:, None] * right
    return Factorization(sigma * mean, left, right, weight.dtype, weight.device, name)


def _multiplier(importance: Tensor | None, what: str) -> tuple[Tensor | None, float]:
    """Return the square root of an importance, scaled to mean 1, and its mean before; None and 0 or 1 if unusable."""
    if importance is None:
        return None, 1.0
    scale = importance.detach().to("cpu", torch.float64)
    peak = scale.abs().max()
    scale = (scale / peak).sqrt()  # within range, whatever the scale
    mean = scale.mean()
    scale = scale / mean
    if not scale.isfinite().all():
        warnings.warn(
            f"{what} is all zero, not finite, or negative; taken as constant, as in the plain SVD", stacklevel=4
        )
        return None, float(peak != 0)
    return scale.clamp_min(RELATIVE_FLOOR), float(peak.sqrt() * mean)


def all_finite(values: Tensor) -> bool:
    """Return whether no value is inf or NaN, without a tensor of their size."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in values.aminmax())


def gram_eigenvectors(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the first ``rank`` right singular vectors of M as columns, and all its singular values, from M^T M.

    Args:
        gram: M^T M, float64 [n, n].
        rank: at most n.
    """
    squares, vectors = torch.linalg.eigh(gram)
    return vectors[:, -rank:].flip(1), squares.flip(0).clamp_min(0).sqrt()


def _right_basis(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the first ``rank`` right singular vectors of a float64 matrix, as columns, and all singular values.

    LAPACK's gesdd on the tall side. The Gram matrix, from ``GRAM_FROM`` on, is twice as fast, but squares the condition
    number: singular values below about 1e-8 of the largest, and their vectors among themselves, are lost in rounding;
    products of higher ranks are as exact.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    if tall.shape[1] >= GRAM_FROM:
        basis, sigma = gram_eigenvectors(tall.T @ tall, rank)
        # on the long side the vectors times sigma are known; QR keeps their order and makes them orthonormal
        return (basis if tall is matrix else torch.linalg.qr(tall @ basis).Q), sigma
    u, sigma, vh = torch.linalg.svd(tall, full_matrices=False)
    return (vh[:rank].T if tall is matrix else u[:, :rank]), sigma
