"""Factorization of one matrix, W -> left, right, by plain or weighted SVD.

Everything is computed in float64 on the CPU; results have the dtype and device of W.

All methods use one function: a truncated SVD of W weighted by an importance per row or column, without any
inverse. For rows, with D = diag(d) and D W = U S V^T, the papers' D^-1 U_k S_k is exactly W V_k; for columns,
with W D = U S V^T, the right factor is exactly U_k^T W. So only an orthonormal basis is needed. Rows and columns
at once need the inverse of one diagonal: with D_a W D_b = U S V^T, the best X of rank k is

    D_a^-1 SVD_k(D_a W D_b) D_b^-1 = (D_a^-1 U_k) (U_k^T D_a W) = (W D_b V_k) (V_k^T D_b^-1)

The basis of the smaller side is taken, which is square and so makes a full-rank product W whatever the multipliers are.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_compress.utils.errors import UserError

Axis = Literal["out", "in", "both"]
SigmaSide = Literal["out", "in", "balanced"]
Importance = Tensor | tuple[Tensor, Tensor]

RELATIVE_FLOOR = 1e-4  # fraction of the mean multiplier: keeps D W of full rank, so that a full-rank product is W
GRAM_FROM = 4096  # if both sides are at least this, eigenvectors of the Gram matrix replace the SVD


@dataclass(frozen=True)
class WeightedSVD:
    """The weighted SVD of one matrix, from :func:`weighted_svd`, which gives the factors of any rank.

    Holds a copy of the weight in its own dtype and one orthonormal basis in float64, both on the CPU.

    Args:
        sigma: float64 [min(out, in)], falling: the singular values of diag(d) W (``in``: W diag(d), ``both``:
            diag(d_rows) W diag(d_columns)) with d = importance ** power in the importance's own scale, so that
            values of several matrices compare; 0 if an importance is all zero. With an importance that is
            not finite they are the plain SVD's.
        weight: [out, in], on the CPU.
        basis: float64 [out, components] (``side`` in) or [in, components] (``side`` out), orthonormal columns.
        scale: float64 multipliers on the basis' side, None for ones.
        side: the factor that has the singular values by construction.
        target: the factor that gets them in results.
        device: device of the results.
        name: name of the matrix in messages.
    """

    sigma: Tensor
    weight: Tensor
    basis: Tensor
    scale: Tensor | None
    side: Literal["out", "in"]
    target: SigmaSide
    device: torch.device
    name: str

    @torch.no_grad()
    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return left [out, rank] and right [rank, in] of the best approximation of that rank.

        Contiguous, in the weight's dtype, on its device.

        Raises:
            UserError: the rank is not in 1 .. min(out, in).
        """
        _check_rank(self.weight, rank, self.name)
        wide, basis = self.weight.double(), self.basis[:, :rank]
        scaled, inverse = basis, basis
        if self.scale is not None:
            scaled, inverse = basis * self.scale[:, None], basis / self.scale[:, None]
        left, right = (inverse, scaled.T @ wide) if self.side == "in" else (wide @ scaled, inverse.T)
        if self.target != self.side:
            sigma = torch.linalg.vector_norm(left if self.side == "out" else right.T, dim=0)
            share = sigma.sqrt() if self.target == "balanced" else sigma
            if self.side == "out":
                left, right = torch.where(share > 0, left / share, 0.0), share[:, None] * right
            else:
                left, right = left * share, torch.where(share > 0, right.T / share, 0.0).T
        return _like(left, self.weight, self.device), _like(right, self.weight, self.device)


@torch.no_grad()
def weighted_svd(
    weight: Tensor,
    importance: Importance | None = None,
    axis: Axis = "out",
    power: float = 0.5,
    sigma_side: SigmaSide | None = None,
    name: str = "weight",
    components: int | None = None,
) -> WeightedSVD:
    """Decompose W once under an importance of its rows, its columns or both, for the factors of any rank.

    A rank's factors minimise || diag(d) (W - left @ right) ||_F for ``axis="out"`` (LPAF Eqs. 7-11),
    || (W - left @ right) diag(d) ||_F for ``axis="in"`` (FWSVD, whose rows are torch's columns), both diagonals at
    once for ``both``, with d = importance ** power: 0.5 weights squared errors by the importance, 1 by its square
    (LPAF Eq. 9 to the letter). Neither scale nor signs of d have an influence; d is floored at 1e-4 of its mean.

    Args:
        weight: [out, in], any float dtype.
        importance: [out], [in], or the pair of them for ``both``; None for the plain SVD. Negative entries have no
            square root; with power 1 they act as their absolute value, as in the paper's formula.
        axis: whether the importance belongs to rows (outputs), columns (inputs), or both.
        power: exponent of the importance.
        sigma_side: the factor that gets the singular values in the plain SVD: ``out`` = left (LPAF), ``in`` = right
            (FWSVD), ``balanced`` = their square roots on both; default: as ``axis``, for ``both`` in.
            With an importance of rows or of columns they are always on that side.
        name: name of the matrix in messages.
        components: number of components to keep; default: all.

    Raises:
        UserError: the weight holds inf or NaN.

    Warns:
        UserWarning: the importance is all zero, or importance ** power is not finite; it counts as constant.
    """
    wide = weight.detach().to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise UserError(f"{name}: holds inf or NaN and cannot be factorized; valid: finite weights")
    left, right, unit = _scales(importance, axis, power, name)
    scaled = wide if left is None else left[:, None] * wide
    scaled = scaled if right is None else scaled * right

    target: SigmaSide = sigma_side or ("in" if axis == "both" else axis)
    side: Literal["out", "in"] = "in" if wide.shape[0] <= wide.shape[1] else "out"
    if axis != "both":
        target = target if left is None and right is None else axis
        side = "in" if target == "in" else "out"
    basis, sigma = _right_basis(scaled.T if side == "in" else scaled, components or min(wide.shape))
    return WeightedSVD(
        sigma=sigma * unit,
        weight=weight.detach().to("cpu", copy=True),
        basis=basis,
        scale=(left if side == "in" else right) if axis == "both" else None,
        side=side,
        target=target,
        device=weight.device,
        name=name,
    )


@torch.no_grad()
def decompose(
    weight: Tensor,
    rank: int,
    importance: Importance | None = None,
    axis: Axis = "out",
    power: float = 0.5,
    sigma_side: SigmaSide | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """Return left [out, rank] and right [rank, in] of :func:`weighted_svd`, whose arguments the others are."""
    _check_rank(weight, rank, name)
    return weighted_svd(weight, importance, axis, power, sigma_side, name, components=rank).factors(rank)


def _check_rank(weight: Tensor, rank: int, name: str) -> None:
    out_features, in_features = weight.shape
    if not 1 <= rank <= min(out_features, in_features):
        raise UserError(
            f"{name}: rank {rank} does not fit a {out_features} x {in_features} matrix; "
            f"valid: 1 to {min(out_features, in_features)}"
        )


def _like(result: Tensor, weight: Tensor, device: torch.device) -> Tensor:
    return result.to(device, weight.dtype).contiguous()


def _scales(
    importance: Importance | None, axis: Axis, power: float, name: str
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return :func:`_multiplier` of the rows and of the columns, and the product of their means before."""
    assert axis in ("out", "in", "both"), axis
    assert importance is None or isinstance(importance, tuple) == (axis == "both")
    rows, columns = (
        importance if isinstance(importance, tuple) else (importance, None) if axis == "out" else (None, importance)
    )
    words = ("importance of rows", "importance of columns") if axis == "both" else ("importance",) * 2
    (left, first), (right, second) = (
        _multiplier(values, power, name, what) for values, what in zip((rows, columns), words, strict=True)
    )
    return left, right, first * second


def _multiplier(importance: Tensor | None, power: float, name: str, what: str) -> tuple[Tensor | None, float]:
    """Return d = importance ** power, scaled to mean 1, float64, and its mean before; None and 0 or 1 if unusable."""
    if importance is None:
        return None, 1.0
    scale = importance.detach().to("cpu", torch.float64)
    peak = scale.abs().max()
    scale = scale / peak  # any scale goes: keeps the power within range
    scale = (scale**power).abs()
    mean = scale.mean()
    scale = scale / mean
    if not scale.isfinite().all():
        warnings.warn(
            f"{name}: {what} is all zero, not finite, or negative under a root; taken as constant, as in the plain SVD",
            stacklevel=6,
        )
        return None, float(peak != 0)
    return scale.clamp_min(RELATIVE_FLOOR), float(peak**power * mean)


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

    LAPACK's gesdd on the tall side. The eigenvectors of the Gram matrix are about twice as fast, but square
    the condition number, which the floor of the importance already stretches: singular values below about 1e-8 of
    the largest, and their vectors among themselves, are lost in rounding. The product of a rank above them, and the
    full-rank one, are as exact as with gesdd. From ``GRAM_FROM`` on speed decides.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    if tall.shape[1] >= GRAM_FROM:
        basis, sigma = gram_eigenvectors(tall.T @ tall, rank)
        # on the long side the vectors times sigma are known; QR keeps their order and makes them orthonormal
        return (basis if tall is matrix else torch.linalg.qr(tall @ basis).Q), sigma
    u, sigma, vh = torch.linalg.svd(tall, full_matrices=False)
    return (vh[:rank].T if tall is matrix else u[:, :rank]), sigma
