"""LowRankLinear against the product of its factors."""

import itertools

import pytest
import torch
from torch import nn

from lit_compress.layers import LowRankLinear
from lit_compress.numerics.decompose import decompose


@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6), (2, 3, 4, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_leading_shape(shape, bias):
    layer = LowRankLinear(6, 5, 2, bias).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape, dtype=torch.float64)
    expected = torch.zeros(*shape[:-1], 5, dtype=torch.float64)
    for index in itertools.product(*map(range, shape[:-1])):
        row = x[index]
        for o in range(5):
            hidden = [sum(layer.right[r, i] * row[i] for i in range(6)) for r in range(2)]
            value = sum(layer.left[o, r] * hidden[r] for r in range(2)) + (layer.bias[o] if bias else 0)
            expected[(*index, o)] = value
    assert torch.allclose(layer(x), expected)


def test_from_factors_keeps_the_bias_and_the_parameter_count():
    """Invariant 8: k (o + i) + o parameters."""
    linear = nn.Linear(7, 5)
    layer = LowRankLinear.from_factors(linear, *decompose(linear.weight.detach(), 3))
    assert layer.bias is linear.bias
    assert sum(p.numel() for p in layer.parameters()) == 3 * (7 + 5) + 5
