"""The error of an approximation, weighted by importances."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_compress.numerics.decompose import Axis, Importance


def weighted_error(
    weight: Tensor, approx: Tensor, importance: Importance | None = None, axis: Axis = "out", power: float = 0.5
) -> float:
    """Return || diag(importance ** power) (weight - approx) ||_F; for ``axis="in"`` the diagonal is on the right.

    For ``both`` there is one on each side, for ``element`` one factor per element. No floor and no normalisation:
    with power 0.5 its square is the objective of LPAF Eq. 7.

    Args:
        weight: [out, in].
        approx: [out, in].
        importance: [out], [in], ([out], [in]) or [out, in] to match ``axis``; None for the plain Frobenius norm.
        axis: whether the importance belongs to rows, columns, both, or single elements.
        power: exponent of the importance.
    """
    error = weight.double() - approx.double()
    if isinstance(importance, tuple):
        assert axis == "both"
        rows, columns = (side.double() ** power for side in importance)
        error = rows[:, None] * error * columns
    elif importance is not None:
        scale = importance.double() ** power
        error = error * (scale[:, None] if axis == "out" else scale)
    return float(torch.linalg.matrix_norm(error))
