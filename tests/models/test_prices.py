"""Parameters of matrices and units by hand counts."""

import copy

import pytest
import torch
from tiny import ALL, make_net

from lit_compress.models.accounting import dense_site_params
from lit_compress.models.architectures import get_architecture
from lit_compress.models.cut import cut_units
from lit_compress.models.prices import prices_of, unit_prices
from lit_compress.models.shapes import without_values
from lit_compress.models.sites import site_shapes, sublayers
from lit_compress.numerics.ranks import Price
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def test_parameters_of_stacks():
    shapes = {"qkv": ((8, 8, 8), 10), "k": ((8,), 10)}
    assert prices_of(shapes) == {"qkv": Price(34, 240), "k": Price(18, 80)}


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
        assert matrices[0] - matrices[1] == price.weights
        assert matrices[0] == price.whole == price.count * price.weights


def test_one_component_of_each_is_the_least():
    net = make_net("bert")
    rule = RankRule(0.02, allocation="global")
    least = sum(price.component for price in rule.prices(net).values()) / dense_site_params(net)
    with pytest.raises(UserError, match=rf"model\.density: 0\.02 of the sites .* make {least + 5e-4:.3f}"):
        rule.check(net)
    RankRule(least + 1e-3, allocation="global").check(net)
