"""Random matrices and second moments for the tests of the numerics."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_compress.numerics.decompose import Side, weighted_svd
from lit_compress.numerics.kronecker import centred

SHAPES = [(6, 9), (9, 6), (7, 7)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw a float64 tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment(size: int, seed: int) -> Tensor:
    """Return a second moment whose eigenvalues spread over two decades."""
    rows = draw(4 * size, size, seed=seed) * torch.logspace(0, -1, size, dtype=torch.float64)
    rows = rows @ torch.linalg.qr(draw(size, size, seed=seed + 100)).Q
    return rows.T @ rows / len(rows)


def decompose(
    weight: Tensor, rank: int, importance: Tensor | None = None, side: Side = "out", name: str = "weight"
) -> tuple[Tensor, Tensor]:
    """Return left [out, rank] and right [rank, in]."""
    return weighted_svd(weight, importance, side, components=rank, name=name).factors(rank)


def estimated_loss(
    weight: Tensor, approx: Tensor, inputs: Tensor | None = None, gradients: Tensor | None = None,
    mean: Tensor | None = None,
) -> float:  # fmt: skip
    """Return (M) = tr(G (W - X) A (W - X)^T), the estimate of 2 dL / T, without any damping.

    Args:
        weight: W [out, in].
        approx: X [out, in].
        inputs: A [in, in], [in] or None.
        gradients: G [out, out], [out] or None. With G times T it is 2 dL of an example.
        mean: m [in], if the bias was corrected by (W - X) m.
    """
    error = (weight.double() - approx.double()).cpu()
    inputs, gradients = (None if x is None else x.cpu().double().clone() for x in (inputs, gradients))
    inputs = inputs if inputs is None else centred(inputs, mean)
    right = error if inputs is None else error * inputs if inputs.ndim == 1 else error @ inputs
    left = error if gradients is None else gradients[:, None] * error if gradients.ndim == 1 else gradients @ error
    return float((left * right).sum())


def weighted_error(weight: Tensor, approx: Tensor, importance: Tensor | None = None, axis: Side = "out") -> float:
    """Return || diag(sqrt(importance)) (weight - approx) ||_F, with the diagonal on the other side for ``axis`` in."""
    rows, columns = (None, importance) if axis == "in" else (importance, None)
    error = weight.double() - approx.double()
    error = error if rows is None else rows.double()[:, None].sqrt() * error
    return float(torch.linalg.matrix_norm(error if columns is None else error * columns.double().sqrt()))
