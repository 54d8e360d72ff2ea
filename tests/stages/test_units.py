"""Heads and neurons removed by their cost: the narrower net against zeroed columns, the queue, the mistakes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import cached_logits
from in_memory import collect_kronecker
from tiny import make_batch, make_net
from transformers import AutoModelForSequenceClassification

from lit_compress.export.fuse import fuse
from lit_compress.export.modelling import ordinary_net, write_model
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.models.accounting import dense_site_params, stored_density
from lit_compress.models.outline import uniform_groups
from lit_compress.models.sites import cuttable, find_sites, sublayers
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe
from lit_compress.numerics.kronecker import DAMPING
from lit_compress.numerics.structures import inverse_moment, without_inputs
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import UnitRemoval, least_density, unit_inputs, weighted
from lit_compress.utils.errors import UserError

FAMILIES = ["bert", "mpnet", "distilbert", "deberta-v2", "modernbert", "bart", "llama", "qwen3", "phi3"]


def removal(density=0.5, **rule):
    return UnitRemoval(RankRule(density, **rule), KroneckerWeighted(removes="structures"))


def remove_units(net, moments, removed, **rule):
    stored = {f"{name}.{key}": v for name, found in moments.items() for key, v in found.stored_inputs().items()}
    removal(**rule).fill(net, {name: ~gone_of(net, name, gone) for name, gone in removed.items()}, stored)


def gone_of(net, name, gone):
    """Which units of a sub-layer are among numbers."""
    (part,) = (part for part in sublayers(net, removable=False) if last(part) == name)
    return torch.zeros(len(unit_inputs(net, part)), dtype=torch.bool).index_fill(0, gone, True)


def make(family="bert", **settings):
    return make_net(family, dropout=0.0, initializer_range=0.2, **settings).eval().double()


def rows(net, size=6):
    batch = make_batch(size=size)
    if net.config.is_encoder_decoder:
        batch["input_ids"][range(size), batch["attention_mask"].sum(1) - 1] = net.config.eos_token_id
    return batch | {"index": torch.arange(size)}


def last(part):
    """The name of the matrix that reads the units of a sub-layer."""
    return part.sites["o" if part.kind == "attention" else "down"]


def moments_of(net):
    return collect_kronecker(net, [rows(net)], "classification", labels="exact")


def logits(net):
    batch = rows(net)
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def measured(net, moments, **rule):
    return {k: v for _, found in removal(**rule).measure(net, (), dict(moments)) for k, v in found.items()}


def chosen(net, moments, density, **rule):
    known = measured(net, moments, **rule)
    kept = removal(density, **rule).plan(net, known)
    removed, units = {name: (~own).nonzero()[:, 0] for name, own in kept.items()}, removal(**rule).units(net, known)
    costs = (units[name].path.loss(torch.tensor([len(gone)])) for name, gone in removed.items() if len(gone))
    return removed, sum(map(float, costs)) / 2


def without(net, moments, name, columns):
    """Least squares of one matrix on the inputs that stay, zeros for the others; the bias carries the mean."""
    layer, found = net.get_submodule(name), moments[name]
    mean = torch.zeros_like(found.mean) if layer.bias is None else found.mean
    weight = without_inputs(layer.weight, inverse_moment(found.inputs() - mean[:, None] * mean), columns)
    if layer.bias is not None:
        layer.bias += (layer.weight - weight) @ mean
    layer.weight.copy_(weight)
    assert not weight[:, columns].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_narrow_net_is_the_one_with_zero_columns(family):
    net, reference = make(family), make(family)
    moments = moments_of(net)
    removed, _ = chosen(net, moments, 0.5)
    assert sum(len(gone) for gone in removed.values()) > 0
    with torch.no_grad():
        for part in cuttable(reference, whole=True):
            name = part.sites["o" if part.kind == "attention" else "down"]
            without(reference, moments, name, unit_inputs(reference, part)[removed[name]].flatten())
    remove_units(net, moments, removed)
    assert torch.allclose(logits(net), logits(reference), atol=1e-8)
    assert not torch.allclose(logits(net), logits(make(family)), atol=1e-4)


@pytest.mark.parametrize(("family", "settings"), [("bert", {}), ("llama", {"num_attention_heads": 8, "head_dim": 4,
                                                                          "num_key_value_heads": 4})])  # fmt: skip
def test_uniform_counts_have_the_smallest_loss(family, settings):
    """As many units in every layer, of all counts within the budget those whose removal costs least; U is as usual."""
    net, reference = make(family, **settings), make(family, **settings)
    moments, density = moments_of(net), 0.66
    units = removal().units(net, measured(net, moments, uniform=True))
    removed, loss = chosen(net, moments, density, uniform=True)
    groups = uniform_groups(net)
    counts = [{group.units - len(removed[part.last]) for part in group.parts} for group in groups]
    assert all(len(found) == 1 for found in counts) and len(groups) == (1 if family == "bert" else 2)
    others = []
    for kept in product(*(group.counts for group in groups)):
        gone = [(group, group.units - count) for group, count in zip(groups, kept, strict=True)]
        if sum(group.price * count for group, count in gone) >= dense_site_params(net) * (1 - density):
            paths = [(units[part.last].path, torch.tensor([count])) for group, count in gone for part in group.parts]
            others.append(sum(float(path.loss(count)) for path, count in paths) / 2)
    assert loss == pytest.approx(min(others))
    with torch.no_grad():
        for name, gone in removed.items():
            width = reference.get_submodule(name).in_features // units[name].count
            without(reference, moments, name, (gone[:, None] * width + torch.arange(width)).flatten())
    remove_units(net, moments, removed, uniform=True)
    assert torch.allclose(logits(net), logits(reference), atol=1e-6) and stored_density(net) <= density
    assert ordinary_net(fuse(net)) is not None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("density", [0.7, 0.4])
def test_the_density_is_reached(family, density):
    net = make(family)
    moments = moments_of(net)
    removed, loss = chosen(net, moments, density)
    remove_units(net, moments, removed)
    assert density - 96 / dense_site_params(net) < stored_density(net) <= density  # up to one neuron, gated or not
    assert loss > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_sublayers_go(family, tmp_path):
    """At a small density some lose all units: they add a constant, the density is in the file, the file loads."""
    net, dense = make(family), make(family)
    moments = moments_of(net)
    density = max(0.1, least_density(net) + 0.001)
    removed, _ = chosen(net, moments, density)
    gone = [p for p in cuttable(dense, whole=True) if len(removed[last(p)]) == len(unit_inputs(dense, p))]
    assert 0 < len(gone) < len(sublayers(dense, gated=False))
    remove_units(net, moments, removed)
    left = {site.name for site in find_sites(net)}
    assert not left & {name for part in gone for name in part.sites.values()}
    assert stored_density(net) <= density
    for part in gone:
        if part.norm:
            assert isinstance(net.get_submodule(part.norm), torch.nn.LayerNorm)
        bias = getattr(dense.get_submodule(last(part)), "bias", None)
        stubs = [net.get_submodule(name) for name in part.stubs if name != part.norm]
        assert sum(stub.bias is not None for stub in stubs) == (bias is not None)
    net = fuse(net.float())
    save_net(net, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(net) and torch.equal(logits(again), logits(net))
    assert stored_density(again) == stored_density(net)
    write_model(net, tmp_path)
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert torch.allclose(logits(alone), logits(net), atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert", "modernbert", "bart", "opt"])
@pytest.mark.parametrize("kind", ["attention", "ffn"])
def test_a_constant_sublayer_goes_first_and_changes_nothing(family, kind):
    """Its last matrix is zero: without any cost it goes whole, and its bias stays."""
    net = make(family)
    part = [part for part in sublayers(net, gated=False) if part.kind == kind][-1]
    layer = net.get_submodule(last(part))
    with torch.no_grad():
        layer.weight.zero_()
        if layer.bias is not None:
            layer.bias.normal_()
    lasts = [last(part) for part in sublayers(net, gated=False)]  # the gradients of the matrices before it are zero
    before, moments = logits(net), collect_kronecker(net, [rows(net)], "classification", lasts, labels="exact")
    whole = sum(net.get_submodule(name).weight.numel() for name in part.sites.values())
    removed, loss = chosen(net, moments, 1 - (whole - 0.5) / dense_site_params(net))
    assert loss == 0 and {name for name, gone in removed.items() if len(gone)} == {last(part)}
    remove_units(net, moments, removed)
    assert not {site.name for site in find_sites(net)} & set(part.sites.values())
    assert torch.allclose(logits(net), before, atol=1e-12)
    assert stored_density(net) == pytest.approx(1 - whole / dense_site_params(net))


@pytest.mark.parametrize("kind", ["attention", "ffn"])
def test_the_cost_of_a_sublayer_by_brute_force(kind, monkeypatch):
    """(M) over tokens one by one: the mean of what the outputs' changes from their mean cost under G."""
    net = make()
    moments = moments_of(net)
    part = next(part for part in sublayers(net, gated=False) if part.kind == kind)
    layer, seen, batch = net.get_submodule(last(part)), [], rows(net)
    hook = layer.register_forward_hook(lambda _, inputs, y: seen.append(y.detach()))
    logits(net)
    hook.remove()
    outputs = seen[0][batch["attention_mask"].bool()]
    mean, gradients = outputs.mean(0), moments[last(part)].gradients()
    expected = sum((y - mean) @ gradients @ (y - mean) for y in outputs) / len(outputs)
    # singular moments: with a thousandth of this damping it is rounding that decides
    for name in DAMPING:
        monkeypatch.setitem(DAMPING, name, 1e-8)
    units = removal().units(net, measured(net, moments))
    assert float(units[last(part)].path.costs.sum()) == pytest.approx(float(expected), rel=1e-6)
    removed = {name: torch.arange(unit.count if name == last(part) else 0) for name, unit in units.items()}
    remove_units(net, moments, removed)
    reference = make()
    reference.get_submodule(last(part)).register_forward_hook(lambda *_: mean)
    assert torch.allclose(logits(net), logits(reference), atol=1e-8)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "opt", "bart"])
def test_what_is_left_is_trained(family):
    """Every parameter that got a gradient before still does: the norm of an input that nothing reads is gone, too."""

    def untrained(net):
        net(**{key: value for key, value in rows(net).items() if key != "index"}).loss.backward()
        return {name for name, p in net.named_parameters() if p.grad is None}

    net, dense = make(family), make(family)
    moments = moments_of(net)
    gone = {last(p): torch.arange(len(unit_inputs(net, p)) * (p.layer == 1)) for p in sublayers(net, gated=False)}
    remove_units(net, moments, gone)
    assert untrained(net) <= untrained(dense)


def test_the_cache_of_a_decoder_keeps_its_count():
    """Its first self-attention keeps a head; generation with the cache is that without, whatever else has gone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    net = make("opt")
    moments = moments_of(net)
    removed, _ = chosen(net, moments, least_density(net))
    kept = {last(p): len(unit_inputs(net, p)) - len(removed[last(p)]) for p in sublayers(net, gated=False)}
    assert list(kept.values()) == [1, *[0] * (len(kept) - 1)]
    torch.manual_seed(0)
    config = AutoConfig.for_model("opt", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64,
                                  vocab_size=100, max_position_embeddings=64)  # fmt: skip
    net = AutoModelForCausalLM.from_config(config).eval().double()
    moments = collect_kronecker(net, [rows(net) | {"labels": rows(net)["input_ids"]}], "language_modelling")
    gone = {last(p): torch.arange(len(unit_inputs(net, p)) * (p.layer == 1)) for p in sublayers(net, gated=False)}
    remove_units(net, moments, gone)
    torch.testing.assert_close(*cached_logits(net), rtol=0, atol=1e-8)


def test_nothing_left_is_one_line():
    net = make()
    with pytest.raises(UserError, match="leaves no head and no neuron; give a larger one"):
        chosen(net, moments_of(net), 1e-4)


def test_mistakes_are_one_line():
    with pytest.raises(
        UserError, match=r"retrain\.removes: 'structures' needs whole second moments, .* nearest: weighting kfac"
    ):
        KroneckerWeighted(weighting="none", removes="structures")
    with pytest.raises(UserError, match=r"retrain\.removes: 'structures' needs a density"):
        weighted(KroneckerWeighted(removes="structures"), RankRule(rank=3)).check(make())
    least = least_density(make())
    with pytest.raises(
        UserError, match=rf"model\.density: 0\.001 cannot be reached .*; the smallest is {least + 5e-4:.3f}"
    ):
        weighted(KroneckerWeighted(removes="structures"), RankRule(0.001)).check(make())
    few = RankRule(least + 1e-3, allocation="global")  # less than one component of every matrix
    weighted(KroneckerWeighted(removes="structures"), few).check(make())
    with pytest.raises(UserError, match=r"model\.density"):
        weighted(KroneckerWeighted(), few).check(make())
    with pytest.raises(UserError, match=r"'albert' cannot be removed .*; nearest: model\.shape uniform"):
        weighted(KroneckerWeighted(removes="structures"), RankRule(0.5)).check(make_net("albert"))
