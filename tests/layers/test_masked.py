"""MaskedLinear: the masked product, and the gradients straight through the mask (spec 2.3)."""

import pytest
import torch
from torch import nn

from lit_compress.layers import LowRankSparseLinear
from lit_compress.layers.training.masked import MaskedLinear


def make(out, inner, keep, bias=True):
    layer = MaskedLinear(nn.Linear(inner, out, bias)).double()
    layer.mask.copy_(torch.tensor(keep))
    with torch.no_grad():
        layer.score.normal_(std=3.0)  # its value must not matter
    return layer


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_loop(shape, bias):
    """Any leading shape; a removed row gives 0, its bias too; with all rows kept it is the Linear."""
    layer, x = make(3, 4, [True, False, True], bias), torch.randn(shape, dtype=torch.float64)
    for row, y in zip(x.reshape(-1, 4), layer(x).reshape(-1, 3), strict=True):
        for i in range(3):
            value = sum(float(layer.weight[i, j]) * float(row[j]) for j in range(4))
            value += float(layer.bias[i]) if bias else 0.0
            assert float(y[i]) == pytest.approx(value * (i != 1))
    assert torch.equal(layer.zeroed()(x), layer(x))
    layer.mask.fill_(True)
    linear = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), linear) and torch.equal(layer.zeroed()(x), linear)


def test_gradients_are_the_formula():
    """2 x 2 by hand: dscore_i = sum_j g_ij W_ij, dW_ij = m_i g_ij, dbias_i = m_i g_i; L = sum_i c_i y_i."""
    layer = make(2, 2, [True, False])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, -5.0]]))
        layer.bias.copy_(torch.tensor([7.0, 11.0]))
    x, c = torch.tensor([13.0, 17.0], dtype=torch.float64), torch.tensor([0.5, -2.0], dtype=torch.float64)
    (layer(x) * c).sum().backward()  # g_ij = c_i x_j
    assert layer.score.grad.tolist() == [0.5 * (13 * 1 + 17 * 2), -2 * (13 * 3 - 17 * 5)]
    assert layer.weight.grad.tolist() == [[6.5, 8.5], [0.0, 0.0]]
    assert layer.bias.grad.tolist() == [0.5, 0.0]


def test_it_takes_the_place_of_a_linear():
    linear = nn.Linear(3, 5)
    layer = MaskedLinear(linear)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert torch.count_nonzero(layer.score) == 0 and layer.mask.all() and layer.mask.dtype == torch.bool
    assert set(layer.state_dict()) == {"weight", "bias", "score", "mask"}
    layer.mask[2] = False
    zeroed = layer.zeroed()
    assert type(zeroed) is LowRankSparseLinear and zeroed.rank == 0 and zeroed.sparse.requires_grad
    assert torch.count_nonzero(zeroed.sparse[2]) == 0 and zeroed.bias[2] == 0 and linear.bias[2] != 0
