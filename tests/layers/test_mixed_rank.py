"""MixedRankLinear: Eq. 12 of LPAF, by a naive loop over the halves."""

import pytest
import torch
from moments import decompose
from torch import nn

from lit_compress.layers import LowRankLinear
from lit_compress.layers.training.mixed_rank import MixedRankLinear


@pytest.fixture
def layer():
    torch.manual_seed(0)
    linear = nn.Linear(6, 5).double()
    return MixedRankLinear.from_factors(linear, *decompose(linear.weight.detach(), 2))


def naive(layer, x, coins):
    rows = []
    for i, row in enumerate(x):
        z = coins[i * len(coins) // len(x)]
        weight = layer.weight if z else layer.left @ layer.right
        rows.append(row @ weight.T + layer.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("coins", [(False,), (True,), (False, False), (True, True), (True, False), (False, True)])
def test_coins_choose_per_half(layer, coins):
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    layer.z = coins
    assert torch.allclose(layer(x), naive(layer, x, coins))


@pytest.mark.parametrize("coins", [(True,), (True, True)])
def test_dense_path_gives_zero_gradients_not_none(layer, coins):
    """Invariants 34 and 35: DDP waits for a gradient of every factor; inputs below get theirs."""
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    layer.z = coins
    layer(x).square().sum().backward()
    assert torch.count_nonzero(layer.left.grad) == 0 and torch.count_nonzero(layer.right.grad) == 0
    assert layer.bias.grad.abs().sum() > 0 and x.grad.abs().sum() > 0
    assert layer.weight.grad is None and not layer.weight.requires_grad


def test_evaluation_ignores_the_coin(layer):
    """Invariant 36."""
    x = torch.randn(4, 6, dtype=torch.float64)
    layer.eval()
    expected = layer(x)
    layer.z = (True, False)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.fuse()(x), expected)


def test_state_has_the_deployed_size_and_fuse_drops_the_matrix(layer):
    assert set(layer.state_dict()) == {"left", "right", "bias"}
    fused = layer.fuse()
    assert type(fused) is LowRankLinear and fused.weight is None


def test_release_frees_the_matrix(layer):
    layer.z = (True,)
    layer.release()
    x = torch.randn(2, 6, dtype=torch.float64)
    assert layer.weight is None
    assert torch.allclose(layer(x), x @ (layer.left @ layer.right).T + layer.bias)
