"""A part of a Linear, or of the layer in its place."""

from __future__ import annotations

import torch
from torch import nn

from lit_compress.layers import LowRankLinear, LowRankSparseLinear, SizedLinear
from lit_compress.models.cut import slice_linear


def test_take_keeps_kind_and_values():
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 5), torch.randn(3, 6)
    rows, columns = torch.tensor([1, 0, 1, 1, 0]).bool(), torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    left, right = torch.randn(5, 2), torch.randn(2, 6)
    masked = x * columns
    for module in (
        linear,
        LowRankLinear.from_factors(linear, left, right),
        LowRankSparseLinear.from_factors(linear, left, right),
    ):
        part = slice_linear(module, rows, columns)
        assert type(part) is (SizedLinear if module is linear else type(module))
        assert torch.allclose(part(x[:, columns]), module(masked)[:, rows], atol=1e-6)
        assert (part.in_features, part.out_features) == (4, 3)
        assert torch.allclose(slice_linear(module, rows=rows)(x), module(x)[:, rows], atol=1e-6)
