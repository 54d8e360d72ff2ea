"""Norms over a part of the hidden states, against the library's norm, and the table of positions of old exports."""

import torch
from torch.nn import functional as F

from lit_compress.layers import NarrowLinear, NarrowNorm


def test_a_padded_norm_is_a_layer_norm_over_zeros_as_well():
    """Of y and zeros up to the whole width; the place that is left free behind y stays 0."""
    norm, x = NarrowNorm(0, 5, 3, 1e-5, 12), torch.randn(2, 4, 5, dtype=torch.float64)
    wanted = F.layer_norm(F.pad(x, (0, 7)), (12,), eps=1e-5)[..., :5]
    torch.testing.assert_close(norm.double()(x), F.pad(wanted, (0, 3)))


def test_a_norm_without_padding_is_a_root_mean_square_and_adds_what_was_before():
    """By hand: y = x + W before + b, over the root of its mean square."""
    norm, x = NarrowNorm(2, 5, 0, 1e-5, 0).double(), torch.randn(2, 4, 7, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    y = x[..., 2:] + x[..., :2] @ norm.weight.T + norm.bias
    torch.testing.assert_close(norm(x), y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_positions_of_earlier_exports_are_looked_up():
    """DeBERTa's attention gives queries and keys its relative positions, here of width 0; heads are padded."""
    layer = NarrowLinear(3, 4, side="out", heads=2, head_width=5, positions=7)
    wanted = F.pad(layer.table.weight.view(7, 2, 2), (0, 3)).view(1, 7, 10)
    assert torch.equal(layer(torch.zeros(1, 7, 0)), wanted)
