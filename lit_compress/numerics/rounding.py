"""Weights on the grid of 4-bit integers on which NNCF's symmetric mode stores them."""

from __future__ import annotations

import torch
from torch import Tensor

LOW, HIGH = -8, 7  # integers of 4 bits


def rounded(weight: Tensor, group: int) -> Tensor:
    """Return ``weight`` [out, in] on the grid: every ``group`` neighbours of a row share a scale.

        s = w / -8, w the weight of the group that is farthest from 0, of two the negative one
        v -> s clamp(round(v / s), -8, 7)

    That is ``compress_weights`` of NNCF with INT4_SYM, without data. The result is on its own grid. ``in`` is a
    multiple of ``group``.
    """
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = torch.where(-low >= high, low, high) / LOW
    scale = scale.where(scale != 0, 1.0)
    return ((groups / scale).round().clamp(LOW, HIGH) * scale).flatten(1)
