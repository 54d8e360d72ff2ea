"""LoSparse's layer and what it becomes: naive loops, every edge, equality of all forms."""

import itertools

import pytest
import torch
from moments import decompose
from torch import nn

from lit_compress.layers import LowRankLinear, LowRankRowsLinear, LowRankSparseLinear

SHAPES = [(6,), (1, 6), (3, 6), (2, 3, 6), (1, 4, 6), (2, 3, 2, 6), (0, 6)]


def make(rank=2, kept=(0, 3, 7), out=9, inner=6, bias=True):
    torch.manual_seed(0)
    linear = nn.Linear(inner, out, bias).double()
    left, right = torch.randn(out, rank).double(), torch.randn(rank, inner).double()
    layer = LowRankSparseLinear.from_factors(linear, left, right)
    with torch.no_grad():
        layer.sparse[[i for i in range(out) if i not in kept]] = 0
    return layer


def naive(layer, x):
    y = torch.zeros(*x.shape[:-1], layer.out_features, dtype=x.dtype)
    for index in itertools.product(*map(range, x.shape[:-1])):
        for o in range(layer.out_features):
            value = layer.bias[o] if layer.bias is not None else 0
            for i in range(layer.in_features):
                low = sum(layer.left[o, r] * layer.right[r, i] for r in range(layer.rank))
                value = value + (low + layer.sparse[o, i]) * x[index][i]
            y[(*index, o)] = value
    return y


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_training_form_and_kept_rows_by_hand(rank, bias, shape):
    layer = make(rank, kept=(0, 3) if rank else (0, 3, 7), bias=bias)
    x = torch.randn(shape).double()
    fused = layer.fuse()
    assert isinstance(fused, LowRankRowsLinear)
    assert torch.allclose(layer(x), naive(layer, x))
    assert torch.allclose(fused(x), naive(layer, x))
    assert fused.index.tolist() == [i for i in range(9) if layer.sparse[i].any()] and fused.index.dtype == torch.int32


def test_decomposition_changes_nothing():
    """Invariant 1: the same function, balanced factors, and S holds the rest of the spectrum."""
    linear, x = nn.Linear(12, 8), torch.randn(5, 12)
    layer = LowRankSparseLinear.from_factors(linear, *decompose(linear.weight.detach(), 3, side="balanced"))
    assert torch.allclose(layer(x), linear(x), atol=1e-6) and layer.bias is linear.bias
    sigma = torch.linalg.svdvals(linear.weight.double())
    for gram in (layer.left.T @ layer.left, layer.right @ layer.right.T):
        assert torch.allclose(gram.double(), sigma[:3].diag(), atol=1e-5)
    assert float(layer.sparse.detach().double().square().sum()) == pytest.approx(
        float(sigma[3:].square().sum()), rel=1e-4
    )
    assert torch.equal(layer.sparse, linear.weight - layer.left @ layer.right)  # from the values as stored


@pytest.mark.parametrize(
    ("rank", "kept", "kind"),
    [
        (2, (), LowRankLinear),
        (0, (), LowRankRowsLinear),
        (0, range(8), LowRankRowsLinear),
        (0, range(9), nn.Linear),
        (2, range(3), LowRankRowsLinear),  # 2 * (9 + 6) + 3 * 6 = 48 < 54
        (2, range(4), nn.Linear),  # 54: nothing saved
        (2, range(9), nn.Linear),
    ],
)
@torch.no_grad()
def test_fuse_is_the_smallest_equal_module(rank, kept, kind):
    layer, x = make(rank, kept), torch.randn(2, 5, 6).double()
    fused = layer.fuse()
    assert type(fused) is kind
    assert torch.allclose(fused(x), layer(x))
    weights = sum(p.numel() for name, p in fused.named_parameters() if name != "bias")
    assert weights == min(54, rank * 15 + 6 * len(kept))
    assert kind is not nn.Linear or fused.weight.dtype == torch.float64


def test_a_row_that_cancels_is_kept():
    layer = make(kept=())
    with torch.no_grad():
        layer.sparse[4, :2] = torch.tensor([1.0, -1.0])
    assert layer.fuse().index.tolist() == [4]


def test_a_pruned_row_still_gets_its_gradient():
    """Invariant 7: the way back is open."""
    layer = make()
    layer(torch.randn(5, 6).double()).square().sum().backward()
    assert layer.sparse.grad[1].abs().sum() > 0


def test_gradients_of_the_deployed_form():
    layer, x = make(), torch.randn(4, 6).double()
    fused = layer.fuse()
    for module in (layer, fused):
        module.zero_grad()
        module(x).square().sum().backward()
    assert torch.allclose(fused.left.grad, layer.left.grad)
    assert torch.allclose(fused.right.grad, torch.cat([layer.right.grad, layer.sparse.grad[[0, 3, 7]]]))


@pytest.mark.parametrize("bias", [True, False])
def test_a_program_of_rows_alone_takes_any_batch(bias):
    """The number of texts that the layer was traced with is not part of it."""
    layer = make(rank=0, bias=bias).fuse().requires_grad_(False)
    assert isinstance(layer, LowRankRowsLinear) and layer.left is None
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (torch.randn(4, 5, 6).double(),), dynamic_shapes=free)
    x = torch.randn(3, 7, 6).double()
    torch.testing.assert_close(program.module()(x), layer(x))
