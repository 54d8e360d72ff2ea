"""Matrices and importances for the tests of the weighted decompositions."""

from __future__ import annotations

import torch
from moments import draw
from torch import Tensor

from lit_compress.numerics.decompose import Axis, Importance, decompose

SHAPES = [(6, 9), (9, 6), (7, 7)]
AXES = ["none", "out", "in", "both"]


def positive(size: int, seed: int = 3) -> Tensor:
    """Draw a vector of importances."""
    return draw(size, seed=seed).abs() + 0.1


def product(weight: Tensor, rank: int, *args: object, **kwargs: object) -> Tensor:
    """Return the product of the factors that ``decompose`` gives, whose form is checked."""
    left, right = decompose(weight, rank, *args, **kwargs)  # type: ignore[arg-type]
    assert left.shape == (weight.shape[0], rank) and right.shape == (rank, weight.shape[1])
    assert left.is_contiguous() and right.is_contiguous() and left.dtype == right.dtype == weight.dtype
    return left @ right


def importance_of(weight: Tensor, axis: str) -> Importance | None:
    """Return importances for a matrix along an axis: none, of rows, of columns, or a pair."""
    rows, columns = positive(weight.shape[0], 3), positive(weight.shape[1], 4) ** 2
    return {"none": None, "out": rows, "in": columns, "both": (rows, columns)}[axis]


def nested(axis: str) -> Axis:
    """Return the axis that ``weighted_svd`` takes for one of ``AXES``."""
    return "out" if axis == "none" else axis  # type: ignore[return-value]


def weighted_error(
    weight: Tensor, approx: Tensor, importance: Importance | None = None, axis: Axis = "out", power: float = 0.5
) -> float:
    """Return || diag(importance ** power) (weight - approx) ||_F, with the diagonals that ``axis`` asks for."""
    rows, columns = importance if isinstance(importance, tuple) else (importance, None)
    if axis == "in":
        rows, columns = columns, rows
    error = weight.double() - approx.double()
    error = error if rows is None else rows.double()[:, None] ** power * error
    return float(torch.linalg.matrix_norm(error if columns is None else error * columns.double() ** power))
