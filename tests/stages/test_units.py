"""Heads and neurons removed by their cost: the narrower net against zeroed columns, the queue, the mistakes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.calibration.kronecker import collect_kronecker
from lit_compress.methods import SecondOrder
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.models.accounting import count_params, dense_site_params, stored_density
from lit_compress.models.sites import sublayers
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.numerics.structures import inverse_moment, remove_inputs
from lit_compress.stages.kronecker import KroneckerDecomposer, biased_sites
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import choose_units, find_units, least_density, remove_units, unit_inputs
from lit_compress.stages.weighted_retraining import check_removal
from lit_compress.utils.errors import UserError

DAMPING = (1e-3, 1e-2)
FAMILIES = ["bert", "distilbert", "deberta-v2", "modernbert", "bart"]


def make(family="bert"):
    return make_net(family, dropout=0.0, initializer_range=0.2).eval().double()


def rows(net, size=6):
    batch = make_batch(size=size)
    if net.config.is_encoder_decoder:
        batch["input_ids"][:, -1] = net.config.eos_token_id
    return batch | {"index": torch.arange(size)}


def moments_of(net):
    return collect_kronecker(net, [rows(net)], "classification", labels="exact")


def logits(net):
    batch = rows(net)
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def chosen(net, moments, density, sigma=None):
    units = find_units(net, moments, biased_sites(net), DAMPING, partial(RankRule().unit_price, net))
    saving = dense_site_params(net) * (1 - density)
    return choose_units(units, saving, sigma or {}, RankRule(stacked=True).prices(net))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_narrow_net_is_the_one_with_zero_columns(family):
    """The literal way: least squares on the columns that stay, zeros in the others, the bias carries the mean."""
    net, reference = make(family), make(family)
    moments, biased = moments_of(net), biased_sites(net)
    removed, _ = chosen(net, moments, 0.5)
    assert sum(len(gone) for gone in removed.values()) > 0
    with torch.no_grad():
        for part in sublayers(reference):
            name = part.sites["o" if part.kind == "attention" else "down"]
            layer, found = reference.get_submodule(name), moments[name]
            columns = unit_inputs(reference, part)[removed[name]].flatten()
            if not len(columns):
                continue
            mean = found.mean if name in biased else torch.zeros_like(found.mean)
            inverse, _ = inverse_moment(found.inputs() - mean[:, None] * mean, DAMPING[0])
            weight, _ = remove_inputs(layer.weight, inverse, columns)
            if layer.bias is not None:
                layer.bias += (layer.weight - weight) @ mean
            layer.weight.copy_(weight)
            assert not weight[:, columns].any()
    remove_units(net, moments, removed, biased, DAMPING[0])
    assert torch.allclose(logits(net), logits(reference), atol=1e-8)
    assert not torch.allclose(logits(net), logits(make(family)), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("density", [0.7, 0.4])
def test_the_density_is_reached(family, density):
    net = make(family)
    moments = moments_of(net)
    removed, loss = chosen(net, moments, density)
    remove_units(net, moments, removed, biased_sites(net), DAMPING[0])
    step = max(dense_site_params(net) // 40, 4 * 32 * 8)  # a head, or 4 % of a layer's neurons
    assert density - step / dense_site_params(net) <= stored_density(net) <= density
    assert loss > 0


def test_one_unit_of_each_stays():
    net = make()
    moments = moments_of(net)
    least = least_density(net)
    removed, _ = chosen(net, moments, least)
    remove_units(net, moments, removed, biased_sites(net), DAMPING[0])
    assert stored_density(net) == pytest.approx(least)
    assert torch.isfinite(logits(net)).all()


def test_with_components_in_the_queue_fewer_units_go():
    net = make()
    moments, rule = moments_of(net), RankRule(0.4, allocation="global", stacked=True)
    decomposer = KroneckerDecomposer(moments, stacks=rule.stacks(net))
    alone, loss = chosen(net, moments, 0.4)
    mixed, less = chosen(net, moments, 0.4, rule.sigmas(net, decomposer.sigma))
    assert 0 < sum(map(len, mixed.values())) < sum(map(len, alone.values()))
    assert 0 < less < loss


def test_cheap_components_are_taken_instead_of_units():
    """Matrices of rank 1 lose all other components for nothing, before any head or neuron goes."""
    net = make()
    moments, prices = moments_of(net), RankRule().prices(net)
    sigma = {name: torch.zeros(min(net.get_submodule(name).weight.shape)).index_fill(0, torch.tensor(0), 1e6)
             for name in prices}  # fmt: skip
    units = find_units(net, moments, biased_sites(net), DAMPING, partial(RankRule().unit_price, net))
    removed, loss = choose_units(units, dense_site_params(net) * 0.5, sigma, prices)
    assert loss == 0 and not any(map(len, removed.values()))


def test_costs_of_units_and_components_are_on_one_scale():
    """A head's cost is (M) of the matrix without it; so is a component's squared singular value."""
    net = make()
    moments = moments_of(net)
    part = next(part for part in sublayers(net) if part.kind == "attention")
    name = part.sites["o"]
    weight, found = net.get_submodule(name).weight.detach(), moments[name]
    path = find_units(net, moments, frozenset(), (1e-9, 1e-9), partial(RankRule().unit_price, net))[name].path
    inverse, _ = inverse_moment(found.inputs(), 1e-9)
    without, _ = remove_inputs(weight, inverse, unit_inputs(net, part)[path.steps[0]].flatten())
    error = weight - without
    expected = torch.trace(found.gradients() @ error @ found.inputs() @ error.T)
    assert float(path.costs[0]) == pytest.approx(float(expected), rel=1e-5)
    svd = kronecker_svd(weight, found.inputs(), found.gradients(), damping=(1e-9, 1e-9))
    error = weight - svd.without(31, 32)
    error = error - (weight - torch.mm(*svd.factors(32)))
    lost = torch.trace(found.gradients() @ error @ found.inputs() @ error.T)
    assert float(lost) == pytest.approx(float(svd.sigma[31].square()), rel=1e-3)


@pytest.mark.parametrize("removes", ["structures", "both"])
def test_as_a_stage(fit, dense, removes):
    """The net that is trained has the density; a checkpoint's structure gives its shapes back."""
    from lit_compress.models.surgery import describe

    seen = {}
    retrain = KroneckerWeighted(epochs=1, learning_rate=1e-12, calibration_examples=60, removes=removes)
    method = SecondOrder(backbone="unused", density=0.4, retrain=retrain)
    look = lambda _, m: seen.update(net=m.net, notes=m.stage.notes)  # noqa: E731
    fit(method, "retrain", dense, max_steps=1, teacher=dense, look=look)
    net = seen["net"]
    assert seen["notes"]["calibration"]["removes"] == removes and seen["notes"]["calibration"]["estimated_loss"] > 0
    assert 0.3 < stored_density(net) <= 0.4
    again = SecondOrder(backbone="unused", density=0.4, retrain=retrain)
    stage = again.stages()[-1]
    other = stage.build(again, dense, describe(net))
    assert {k: v.shape for k, v in other.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}
    assert count_params(other) == count_params(net)


def test_mistakes_are_one_line():
    with pytest.raises(
        UserError, match=r"retrain\.removes: 'both' needs whole second moments, .* nearest: weighting kfac"
    ):
        KroneckerWeighted(weighting="none", removes="both")
    with pytest.raises(UserError, match=r"retrain\.removes: 'structures' needs a density"):
        check_removal(KroneckerWeighted(removes="structures"), RankRule(rank=3), make())
    least = least_density(make())
    with pytest.raises(
        UserError, match=rf"model\.density: 0\.01 cannot be reached .*; the smallest is {least + 5e-4:.3f}"
    ):
        check_removal(KroneckerWeighted(removes="structures"), RankRule(0.01), make())
    with pytest.raises(UserError, match="sub-layers of 'llama' cannot be gated"):
        check_removal(KroneckerWeighted(removes="both"), RankRule(0.5), make_net("llama"))
