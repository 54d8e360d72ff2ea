"""Nets without values have the names, the shapes and the shared tensors of nets with values."""

import torch
from tiny import make_net

from lit_compress.models.backbones import empty_net
from lit_compress.models.shapes import without_values


def test_the_random_numbers_stay():
    config = make_net("bert").config
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    without_values(lambda: empty_net(config))
    assert torch.equal(torch.rand(3), first)
