"""Prices of matrices and units: parameters and FLOPs by hand counts."""

import copy

import pytest
import torch
from tiny import ALL, make_net

from lit_compress.models.accounting import flops
from lit_compress.models.architectures import get_architecture
from lit_compress.models.cut import cut_units
from lit_compress.models.prices import prices_of, unit_prices
from lit_compress.models.shapes import without_values
from lit_compress.models.sites import find_sites, site_shapes, sublayers
from lit_compress.numerics.ranks import Price
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def test_parameters_and_flops():
    shapes = {"qkv": ((8, 8, 8), 10), "k": ((8,), 10)}
    assert prices_of(shapes, {}, "parameters") == {"qkv": Price(34, 240), "k": Price(18, 80)}
    assert prices_of(shapes, {"qkv": 5, "k": 2}, "flops") == {"qkv": Price(340, 2400), "k": Price(72, 320)}


@pytest.mark.parametrize(("family", "task"), [("bert", "sst2"), ("bart", "xsum")])
def test_flops_are_those_of_the_net(family, task):
    """The sum over the sites is what a forward counts without its other products."""
    net = make_net(family, task).eval()
    others = make_net(family, task).eval()
    for site in find_sites(others):
        others.get_submodule(site.name).forward = lambda x, out=others.get_submodule(site.name).out_features: (
            x.new_zeros(*x.shape[:-1], out)
        )
    total = RankRule(0.5, allocation="global", price="flops", tokens=24).total(net)
    assert total == flops(net, 24) - flops(others, 24)


def test_a_unit_costs_its_share():
    net = make_net("bert")
    part = next(p for p in sublayers(net) if p.kind == "attention")
    rule = RankRule(0.5, allocation="global")
    assert rule.unit_price(net, part) == 4 * 32 * 32 / 4
    assert RankRule(0.5, allocation="global", price="flops", tokens=10).unit_price(net, part) == 20 * 32 * 32


@pytest.mark.parametrize("family", ALL)
def test_a_unit_weighs_what_a_net_without_it_lacks(family):
    """Delete one head, or head of keys with its queries, or neuron, and count the parameters that are left."""
    kind, settings = ALL[family]
    net = without_values(lambda: make_net(kind, **settings))
    parts, cuts_heads = sublayers(net, removable=False), get_architecture(net).cuts_heads
    table = unit_prices(net, parts)
    assert {part.last for part in parts} == table.keys()
    assert sum(price.whole for price in table.values()) == sum(out * inner for out, inner in site_shapes(net).values())
    for part in (part for part in parts if part.kind == "ffn" or cuts_heads):
        smaller, price = copy.deepcopy(net), table[part.last]
        cut_units(smaller, {part.last: torch.arange(price.count) != price.count - 1})
        matrices = [sum(of.get_parameter(f"{name}.weight").numel() for name in part.sites.values())
                    for of in (net, smaller)]  # fmt: skip
        assert matrices[0] - matrices[1] == price.weights == price.at("parameters", {})
        assert matrices[0] == price.whole == price.count * price.weights


def test_one_component_of_each_is_the_least():
    net = make_net("bert")
    rule = RankRule(0.02, allocation="global")
    least = sum(price.component for price in rule.prices(net).values()) / rule.total(net)
    with pytest.raises(UserError, match=rf"model\.density: 0\.02 of the sites .* make {least + 5e-4:.3f}"):
        rule.check(net)
    RankRule(least + 1e-3, allocation="global").check(net)


def test_what_a_price_needs():
    with pytest.raises(UserError, match=r"model\.price: 'flops' needs a density; give model\.density"):
        RankRule(rank=3, price="flops")
    with pytest.raises(UserError, match=r"model\.price: 'flops' needs one budget .* nearest: global"):
        RankRule(0.5, price="flops")
    with pytest.raises(UserError, match=r"model\.price: a table of embeddings costs no flops; .* parameters"):
        RankRule(0.5, allocation="global", price="flops", scope="all")
