"""Random matrices and second moments for the tests of the numerics."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw a float64 tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment(size: int, seed: int) -> Tensor:
    """Return a second moment whose eigenvalues spread over two decades."""
    rows = draw(4 * size, size, seed=seed) * torch.logspace(0, -1, size, dtype=torch.float64)
    rows = rows @ torch.linalg.qr(draw(size, size, seed=seed + 100)).Q
    return rows.T @ rows / len(rows)
