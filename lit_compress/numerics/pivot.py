"""Pivot form of a low-rank matrix: k^2 parameters fewer, the same product.

left [out, k] of rank k has k independent rows. With them first, left = P [I; Z] B, and B [k, k] goes into the right
factor (second-order compression, section 4; PIFA, ICML 2025, arXiv 2501.19090):

    left @ right = P [I; Z] R',    R' = B right [k, in],    Z [out - k, k]

k (out + in - k) parameters instead of k (out + in). The rows are those that a QR decomposition with column pivoting
chooses from an orthonormal basis of left's columns, which keeps the entries of Z small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_compress.utils.errors import UserError

RELATIVE_RANK = 1e-10  # a pivot below this part of the first one: left has no more independent rows


@dataclass(frozen=True)
class PivotForm:
    """left @ right as ``[I; Z] R'`` and an order of its rows.

    Attributes:
        right: R' [k, in], the rows ``order[:k]`` of the product.
        rest: Z [out - k, k]; the other rows of the product are Z R'.
        order: int64 [out]; row i of [I; Z] R' is row ``order[i]`` of the product.
    """

    right: Tensor
    rest: Tensor
    order: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return left [out, k] and right [k, in] with the same product."""
        rank = len(self.right)
        one = torch.eye(rank, dtype=self.rest.dtype, device=self.rest.device)
        return torch.cat([one, self.rest])[self.order.argsort()], self.right


@torch.no_grad()
def pivot_form(left: Tensor, right: Tensor, name: str = "weight") -> PivotForm:
    """Return the pivot form of ``left @ right``, in their dtype and on their device.

    Args:
        left: [out, k], k <= out, of rank k.
        right: [k, in].
        name: of the matrix, for messages.

    Raises:
        UserError: left has fewer than k independent rows, or holds inf or NaN.
    """
    out, rank = left.shape
    assert rank <= out and len(right) == rank, (left.shape, right.shape)
    wide = left.detach().to("cpu", torch.float64)
    if not wide.isfinite().all():
        raise UserError(f"{name}: its left factor holds inf or NaN; valid: finite weights")
    basis, independent = _basis(wide)
    if not independent:
        raise UserError(f"{name}: its left factor of rank {rank} has dependent columns; give a smaller rank")
    pivots = independent_rows(basis)
    others = torch.ones(out, dtype=torch.bool).index_fill(0, pivots, False).nonzero()[:, 0]
    rest = torch.linalg.solve(basis[pivots].T, basis[others].T).T
    product = wide[pivots] @ right.detach().to("cpu", torch.float64)
    new_right, new_rest = (part.to(left.device, left.dtype).contiguous() for part in (product, rest))
    return PivotForm(new_right, new_rest, torch.cat([pivots, others]).to(left.device))


def has_pivots(left: Tensor) -> bool:
    """Return whether ``left`` [out, k] is finite and has k independent rows, as :func:`pivot_form` needs."""
    wide = left.detach().to("cpu", torch.float64)
    return left.shape[0] >= left.shape[1] > 0 and bool(wide.isfinite().all()) and _basis(wide)[1]


def _basis(left: Tensor) -> tuple[Tensor, bool]:
    """Return an orthonormal basis [out, k] of the columns of ``left``, and whether they are independent."""
    basis, mix = torch.linalg.qr(left)
    lengths = mix.diagonal().abs()
    return basis, not bool((lengths <= RELATIVE_RANK * lengths.max()).any())


def independent_rows(basis: Tensor) -> Tensor:
    """Return k rows of ``basis`` [out, k] that are independent: the pivots of a QR decomposition of its transpose.

    Each is the row that is longest after the projections onto the rows chosen before are taken away.

    Args:
        basis: float64 [out, k], of rank k.

    Returns:
        int64 [k], in the order of choice.
    """
    left = basis.clone()
    chosen = []
    for _ in range(basis.shape[1]):
        lengths = left.square().sum(1)
        chosen.append(int(lengths.argmax()))
        direction = left[chosen[-1]] / lengths[chosen[-1]].sqrt()
        left -= (left @ direction)[:, None] * direction
        left[chosen[-1]] = 0.0
    return torch.tensor(chosen)
