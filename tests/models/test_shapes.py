"""Nets without values have the names, the shapes and the shared tensors of nets with values."""

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.models.backbones import empty_net
from lit_compress.models.shapes import with_zeros, without_products, without_values
from lit_compress.models.sites import find_sites


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


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "gpt_neox", "phi3"])
def test_without_products_everything_else_runs(family):
    """Where products give zeros, as matrices of zeros do, the outputs are those of zeros; no product is left."""
    net = with_zeros(without_values(lambda: empty_net(make_net(family).config))).eval()
    names = [site.name for site in find_sites(net)]
    for name in names:
        bias = net.get_submodule(name).bias
        assert bias is None or not bias.any()
    bare, batch = without_products(net, names), make_batch()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    assert torch.equal(bare(**inputs).logits, net(**inputs).logits)
    for name in names:
        layer = bare.get_submodule(name)
        layer.weight = torch.nn.Parameter(torch.full_like(layer.weight, torch.nan))
    assert torch.equal(bare(**inputs).logits, net(**inputs).logits)
