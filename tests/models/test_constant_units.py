"""Heads and neurons that became constants are cut away, nothing else is; the function stays (test_row_sizes.py)."""

import torch
from helpers import logits
from tiny import make_net

from lit_compress.export.fuse import compact
from lit_compress.layers import LowRankSparseLinear
from lit_compress.models.constant_units import remove_constant_units
from lit_compress.models.cut import cut_closed
from lit_compress.models.sites import cuttable, find_sites, sublayers
from lit_compress.models.surgery import describe, factorize

BLOCK = "bert.encoder.layer.{}."


def rows_net():
    """A net of rank-0 layers with random values, and its layers by name in the first block."""
    net = make_net("bert", dropout=0.0).eval()
    factorize(net, {site.name: 0 for site in find_sites(net)}, None, LowRankSparseLinear)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3)
    return net


def zero(net, name, rows, layer=0):
    with torch.no_grad():
        net.get_submodule(f"{BLOCK.format(layer)}{name}").sparse[rows] = 0


def test_nothing_to_cut():
    """Dense nets, nets with a low-rank part, and zeros that are not of whole heads stay as they are."""
    net = make_net()
    with torch.no_grad():
        net.get_submodule(f"{BLOCK.format(0)}intermediate.dense").weight[:5] = 0
    assert describe(compact(net)) == {}
    net = rows_net()
    zero(net, "attention.self.value", slice(0, 7))
    zero(net, "attention.self.query", slice(None))
    before = describe(net)
    remove_constant_units(net)
    assert describe(net) == before
    assert torch.allclose(logits(compact(net)), logits(net), atol=1e-5)


def test_a_net_without_an_attention_loses_neurons():
    net = rows_net()
    zero(net, "intermediate.dense", slice(0, 10))
    parts = sublayers(net)
    cut_closed(net, {"attention_layer": torch.tensor([[0.0], [1.0]])})
    assert [part.last for part in cuttable(net)] == [part.last for part in parts[1:]]
    fused = compact(net)
    assert torch.allclose(logits(fused), logits(net), atol=1e-5)
    assert fused.get_submodule(parts[1].last).in_features == 54
