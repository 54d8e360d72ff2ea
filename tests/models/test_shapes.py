"""Nets without values have the names, the shapes and the shared tensors of nets with values."""

import pytest
import torch
from tiny import make_net

from lit_compress.models.backbones import empty_net
from lit_compress.models.shapes import without_values


@pytest.mark.parametrize(
    ("family", "task"), [("bert", "sst2"), ("albert", "sst2"), ("t5", "xsum"), ("opt", "wikitext2")]
)
def test_they_are_those_of_nets_with_values(family, task):
    config = make_net(family, task).config
    net, empty = empty_net(config), without_values(lambda: empty_net(config))
    assert {n: p.shape for n, p in net.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
    assert all(p.is_meta for p in empty.parameters())


def test_the_random_numbers_stay():
    config = make_net("bert").config
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    without_values(lambda: empty_net(config))
    assert torch.equal(torch.rand(3), first)
