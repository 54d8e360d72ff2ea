"""Nets without values have the sizes of those that are stored."""

import copy

import pytest
import torch
from helpers import logits, net_of
from tiny import ALL, TINY, VARIANTS, make_net

from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import ordinary_net
from lit_compress.layers import LowRankRowsLinear
from lit_compress.models.accounting import count_params, dense_site_params, flops, stored_density
from lit_compress.models.architectures import get_architecture
from lit_compress.models.cut import cut_units
from lit_compress.models.outline import cut_evenly, even_counts, file_bytes, keep_rows_evenly, uniform_groups
from lit_compress.models.sites import find_sites, site_shapes, sublayers
from lit_compress.models.storage import save_net
from lit_compress.models.surgery import factorize, with_random_values, without_values
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def empty(family="bert", **settings):
    net = make_net(family, **settings)
    return without_values(lambda: type(net)(net.config))


@pytest.mark.parametrize("family", ["bert", "bart", "llama", "deberta-v2"])
def test_the_size_of_the_file(family, tmp_path):
    net = make_net(family)
    save_net(net, tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert file_bytes(net) == file_bytes(without_values(lambda: type(net)(net.config))) == size


def test_the_size_of_a_file_with_rows_and_factors(tmp_path):
    net = make_net("bert")
    factorize(net, {find_sites(net)[0].name: 3}, None)
    row = LowRankRowsLinear(32, 32, 0, 5, bias=False)
    net.bert.encoder.layer[1].attention.self.query = row  # has an index of integers
    save_net(net, tmp_path)
    assert file_bytes(net) == (tmp_path / "model.safetensors").stat().st_size


def test_random_numbers_in_place_of_values():
    net = make_net("bert", max_position_embeddings=20)
    made = with_random_values(without_values(lambda: type(net)(net.config)))
    assert all(0 < p.abs().max() < 0.2 for p in made.parameters())
    assert torch.equal(made.bert.embeddings.position_ids, net.bert.embeddings.position_ids)


@pytest.mark.parametrize("density", [0.0625, 0.2, 0.5, 0.8])  # at the first one whole attentions go
def test_units_are_cut_evenly(density):
    net = empty(hidden_size=64, intermediate_size=256)
    whole = dense_site_params(net)
    cut = cut_evenly(net, density)
    assert count_params(cut).sites / whole == pytest.approx(density, rel=0.01)
    assert flops(cut, 12) < flops(empty(hidden_size=64, intermediate_size=256), 12)


@pytest.mark.parametrize("density", [0.1, 0.3, 0.6])
def test_rows_are_kept_evenly(density):
    net = empty()
    sites, whole = [site.name for site in find_sites(net)], dense_site_params(net)
    keep_rows_evenly(net, dict.fromkeys(sites, 1), round(density * whole))
    assert density - 0.02 <= count_params(net).sites / whole <= density
    assert {type(net.get_submodule(name)) for name in sites} == {LowRankRowsLinear}


@pytest.mark.parametrize("family", ALL)
def test_a_unit_weighs_what_a_net_without_it_lacks(family):
    """Delete one head, or head of keys with its queries, or neuron, and count the parameters that are left."""
    kind, settings = ALL[family]
    net = without_values(lambda: make_net(kind, **settings))
    parts, cuts_heads = sublayers(net, removable=False), get_architecture(net).cuts_heads
    assert sum(part.weights(net) for part in parts) == sum(out * inner for out, inner in site_shapes(net).values())
    for part in (part for part in parts if part.kind == "ffn" or cuts_heads):
        smaller, count = copy.deepcopy(net), part.count(net)
        cut_units(smaller, {part.last: torch.arange(count) != count - 1})
        matrices = [sum(of.get_parameter(f"{name}.weight").numel() for name in part.sites.values())
                    for of in (net, smaller)]  # fmt: skip
        assert matrices[0] - matrices[1] == part.price(net)
        assert matrices[0] == part.weights(net) == count * part.price(net)


def test_one_component_of_each_is_the_least():
    net = make_net("bert")
    rule = RankRule(0.02, allocation="global")
    least = sum(map(sum, site_shapes(net).values())) / dense_site_params(net)
    with pytest.raises(UserError, match=f"0.02 is less than one rank of .* nearest valid value {least + 5e-5:.4f}"):
        rule.allocate(net)
    RankRule(least + 1e-3, allocation="global").allocate(net)


OF_HEADS = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text")  # a head has a width of its own


@pytest.mark.parametrize("family", [*TINY, "qwen3-sliding", "bart-uneven", "t5-gated", "modernbert-biases"])
def test_every_family_is_an_ordinary_net_of_other_sizes(family, tmp_path):
    """The library's own class loads it, with the logits of the net that was cut; any head or neuron may be kept."""
    kind, settings = VARIANTS.get(family, (family, {}))
    net, generator = net_of(kind, torch.float32, **settings), torch.Generator().manual_seed(0)
    counts = even_counts(net, 0.7)
    units = {part.last: group.units for group in uniform_groups(net) for part in group.parts}
    cut_units(net, {name: torch.randperm(units[name], generator=generator) < count for name, count in counts.items()})
    small = fuse(net)
    assert 0.65 < stored_density(small) <= 0.7
    assert any("o_proj" in name for name in counts) == (kind in OF_HEADS)
    ordinary = ordinary_net(small)
    ordinary.config.architectures = [type(net).__name__]
    save_net(ordinary, tmp_path)
    again = type(net).from_pretrained(tmp_path)
    assert torch.allclose(logits(again), logits(net), atol=1e-5)
    assert (ordinary.get_input_embeddings().weight is getattr(ordinary.get_output_embeddings(), "weight", None)) == (
        net.get_input_embeddings().weight is getattr(net.get_output_embeddings(), "weight", None)
    )


def test_what_differs_from_layer_to_layer_is_not_ordinary():
    net = net_of("llama", torch.float32)
    assert ordinary_net(fuse(net)) is not None
    first, *_ = (name for name in even_counts(net, 0.6) if "down_proj" in name)
    cut_units(net, {first: torch.arange(64) < 40})
    assert ordinary_net(fuse(net)) is None
    net = net_of("bert", torch.float32)
    cut_units(net, {f"bert.encoder.layer.{i}.attention.output.dense": torch.arange(4) < 2 for i in range(2)})
    assert ordinary_net(fuse(net)) is None  # its heads are as many as the width of hidden states says
    net = net_of("qwen3", torch.float32)
    cut_units(net, {name: torch.zeros(64, dtype=torch.bool) for name in even_counts(net, 0.6) if "down_proj" in name})
    assert ordinary_net(fuse(net)) is None  # no configuration has 0 neurons


def test_counts_are_even_and_valid():
    """Llama's configuration wants a divisor of the width; key/value groups go whole, and neurons fill the budget."""
    net = net_of("llama", torch.float32, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    heads, neurons = uniform_groups(net, 8)
    assert heads.counts == (1, 2, 4) and neurons.counts == (8, 16, 24, 32, 40, 48, 56, 64)
    small = without_values(lambda: net_of("llama", torch.float32))
    units = {part.last: group.units for group in uniform_groups(small, 8) for part in group.parts}
    cut_units(small, {name: torch.arange(units[name]) < count for name, count in even_counts(small, 0.5, 8).items()})
    assert 0.4 < stored_density(small) <= 0.5
    with pytest.raises(UserError, match=r"density: 0\.01 cannot be reached with model\.shape uniform.* is 0\.1"):
        even_counts(net, 0.01)
