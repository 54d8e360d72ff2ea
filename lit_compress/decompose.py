"""W -> left, right: the maths of one matrix. Everything is float64 on the CPU; results return to the caller's
dtype and device.

One primitive serves every method: a truncated SVD of W under a per-row or per-column importance, without any
inverse. For rows, with D = diag(d) and D W = U S V^T, the papers' D^-1 U_k S_k is exactly W V_k; for columns,
with W D = U S V^T, the right factor is exactly U_k^T W. So only an orthonormal basis is needed.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from lit_compress.errors import UserError

Axis = Literal["out", "in"]
SigmaSide = Literal["out", "in", "balanced"]

RELATIVE_FLOOR = 1e-4  # of the mean multiplier: keeps D W of full rank, so that a full-rank product is W


@torch.no_grad()
def decompose(
    weight: Tensor,
    rank: int,
    importance: Tensor | None = None,
    axis: Axis = "out",
    power: float = 0.5,
    sigma_side: SigmaSide | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """Factors whose product is the best rank-``rank`` approximation of W in the weighted Frobenius norm.

    Minimises || diag(d) (W - left @ right) ||_F for ``axis="out"`` (LPAF Eqs. 7-11), or
    || (W - left @ right) diag(d) ||_F for ``axis="in"`` (FWSVD, whose rows are torch's columns), with
    d = importance ** power: 0.5 weights squared errors by the importance, 1 by its square (LPAF Eq. 9 to the
    letter). The scale of d has no influence and neither have its signs; d is floored at 1e-4 of its mean.

    Args:
        weight: [out, in], any float dtype.
        rank: columns of left, 1 to min(out, in).
        importance: [out] or [in] to match ``axis``; None for the plain SVD. Negative entries have no square
            root; with power 1 they act as their absolute value, as in the paper's formula.
        axis: whether the importance belongs to rows (outputs) or columns (inputs).
        power: exponent of the importance.
        sigma_side: where the singular values go in the plain SVD (LPAF: out; FWSVD: in; balanced: their
            root on both sides); default: the side of ``axis``. A weighted SVD has them on that side anyway.
        name: what to call this matrix in messages.

    Returns:
        left [out, rank] and right [rank, in], contiguous, in the weight's dtype, on its device.

    Raises:
        UserError: the weight holds inf or NaN, or the rank does not fit.

    Warns:
        UserWarning: the importance is all zero, or importance ** power is not finite; the plain SVD is used.
    """
    out_features, in_features = weight.shape
    if not 1 <= rank <= min(out_features, in_features):
        raise UserError(
            f"{name}: rank {rank} does not fit a {out_features} x {in_features} matrix; "
            f"valid: 1 to {min(out_features, in_features)}"
        )
    wide = weight.detach().to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise UserError(f"{name}: holds inf or NaN and cannot be factorized; valid: finite weights")

    scale = None if importance is None else _multiplier(importance, power, name)
    if scale is not None:
        assert scale.shape == (out_features if axis == "out" else in_features,)
    side = axis if scale is not None or sigma_side is None else sigma_side
    if side == "in":
        basis = _right_basis((wide if scale is None else wide * scale).T, rank)  # U_k
        left, right = basis, basis.T @ wide
    else:
        basis = _right_basis(wide if scale is None else scale[:, None] * wide, rank)  # V_k
        left, right = wide @ basis, basis.T
        if side == "balanced":
            root = torch.linalg.vector_norm(left, dim=0).sqrt()
            left, right = torch.where(root > 0, left / root, 0.0), root[:, None] * right
    return _like(left, weight), _like(right, weight)


def _multiplier(importance: Tensor, power: float, name: str) -> Tensor | None:
    """d = importance ** power, mean 1 and floored, float64; None, after a warning, if it says nothing."""
    scale = importance.detach().to("cpu", torch.float64)
    scale = scale / scale.abs().max()  # any scale goes: keeps the power within range
    scale = (scale**power).abs()
    scale = scale / scale.mean()
    if not scale.isfinite().all():
        warnings.warn(
            f"{name}: importance is all zero, not finite, or negative under a root; using the plain SVD",
            stacklevel=3,
        )
        return None
    return scale.clamp_min(RELATIVE_FLOOR)


def _right_basis(matrix: Tensor, rank: int) -> Tensor:
    """The first ``rank`` right singular vectors of a float64 matrix, as columns.

    LAPACK's gesdd on the tall side. The eigenvectors of the Gram matrix would be about twice as fast at these
    sizes, but square the condition number, which the floor of the importance already stretches.
    """
    basis: Tensor
    if matrix.shape[0] >= matrix.shape[1]:
        basis = torch.linalg.svd(matrix, full_matrices=False)[2][:rank].T
    else:
        basis = torch.linalg.svd(matrix.T, full_matrices=False)[0][:, :rank]
    return basis


def _like(factor: Tensor, weight: Tensor) -> Tensor:
    return factor.to(weight.device, weight.dtype).contiguous()


@torch.no_grad()
def rank_of(weight: Tensor) -> int:
    """Numerical rank [out, in] -> int: singular values above sigma_max * max(out, in) * eps(float32).

    The tolerance is float32's, the SVD float64's: with float64's own tolerance, rounding in a float32 product
    of rank 300 counts as rank 768.
    """
    sigma = torch.linalg.svdvals(weight.detach().to("cpu", torch.float64))
    tolerance = sigma.max() * max(weight.shape) * torch.finfo(torch.float32).eps
    return int((sigma > tolerance).sum())


@torch.no_grad()
def weighted_error(
    weight: Tensor, approx: Tensor, importance: Tensor | None = None, axis: Axis = "out", power: float = 0.5
) -> float:
    """|| diag(importance ** power) (weight - approx) ||_F; for ``axis="in"`` the diagonal is on the right.

    No floor and no normalisation: with power 0.5 its square is the objective of LPAF Eq. 7.

    Args:
        weight: [out, in].
        approx: [out, in].
        importance: [out] or [in] to match ``axis``; None for the plain Frobenius norm.
        axis: what the importance belongs to.
        power: exponent of the importance.
    """
    error = weight.double() - approx.double()
    if importance is not None:
        scale = importance.double() ** power
        error = error * (scale[:, None] if axis == "out" else scale)
    return float(torch.linalg.matrix_norm(error))


def break_even_rank(out_features: int, in_features: int) -> float:
    """out * in / (out + in): a factorization pays only below this rank (384 for 768 x 768)."""
    return out_features * in_features / (out_features + in_features)


def rank_for_density(density: float, out_features: int, in_features: int) -> int:
    """Largest rank with at most ``density`` of the parameters; at least 1.

    floor(density * out * in / (out + in)), the rule of SVD-LLM.

    Raises:
        UserError: ``density`` is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:
        raise UserError(f"density {density} is not a kept fraction; valid: above 0, at most 1")
    rank = density * break_even_rank(out_features, in_features)
    return max(1, math.floor(rank + 1e-9))  # a density made from a rank gives that rank back
