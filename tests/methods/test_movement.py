"""Movement pruning of rows: schedule, budget, own learning rate, penalty."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import taken_out
from tiny import make_net

from lit_compress.export.fuse import fuse
from lit_compress.layers import MaskedLinear
from lit_compress.methods import Movement
from lit_compress.methods.movement import MovementPruning
from lit_compress.models.accounting import count_params, dense_site_params
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import replace
from lit_compress.numerics.masks import keep_count, select_rows
from lit_compress.stages.movement import MovementTraining


def movement(density=0.3, **settings):
    ramp = {"epochs": 2, "learning_rate": 1e-3, "start": 0.2, **settings}
    return Movement(backbone="unused", density=density, prune=MovementTraining(**ramp))


def layers(method):
    return [method.net.get_submodule(site.name) for site in find_sites(method.net)]


def share(method):
    """The stored share of the weights, counted in the export."""
    net = taken_out(method.net)
    return count_params(fuse(net)).sites / dense_site_params(net)


def test_hard_masks_follow_the_schedule(fit, dense):
    """Spec 2.3: all ones until t_i; from then on the best rows of all matrices together, weighted by parameters."""
    seen = []

    def look(trainer, method):
        stage, step = method.stage, trainer.global_step
        seen.append(share(method))
        if step <= stage._start:
            assert seen[-1] == 1.0
        scores = [layer.score.detach() for layer in layers(method)]
        total = sum(layer.weight.numel() for layer in layers(method))
        expected = select_rows(scores, stage._sizes.choose, keep_count(stage.target(step), total))
        assert all(torch.equal(layer.mask, e) for layer, e in zip(layers(method), expected, strict=True))
        assert 0 <= stage.target(step) * total + 0.5 - seen[-1] * total < 65

    method = fit(movement(), "prune", dense, look)
    assert seen[-1] <= 0.3 + 1e-9 and method.stage.at_budget(len(seen)) and not method.stage.at_budget(10)
    assert method.stage.status(method.net, len(seen)) == {"target": 0.3, "density": seen[-1]}


def test_scores_have_their_own_learning_rate(fit, dense):
    """One AdamW: the scores at 1e-2 without decay, the rest as ever; the schedule scales all."""
    rates = []

    def look(trainer, method):
        groups = trainer.optimizers[0].param_groups
        assert [len(g["params"]) for g in groups[2:]] == [12] and groups[2]["weight_decay"] == 0.0
        assert {id(p) for p in groups[2]["params"]} == {id(layer.score) for layer in layers(method)}
        assert groups[0]["weight_decay"] == 0.1
        every = [id(p) for g in groups for p in g["params"]]
        assert sorted(every) == sorted(id(p) for p in method.net.parameters())
        rates.append((groups[0]["lr"], groups[1]["lr"], groups[2]["lr"]))

    fit(movement(weight_decay=0.1, score_learning_rate=2e-2), "prune", dense, look)
    assert all(a == b and c == pytest.approx(20 * a) for a, b, c in rates) and max(c for *_, c in rates) > 0.015


def test_soft_penalty_is_the_gradient_of_its_formula():
    """lambda(t) sum over {attention, feed-forward} of (1 / 2) mean over matrices of mean_i sigmoid(s_i)."""
    stage = MovementPruning(MovementTraining(form="soft", penalty=3000.0, start=0.0, end=0.0), 0.4)
    net = make_net()
    for site in find_sites(net):
        replace(net, site.name, MaskedLinear(net.get_submodule(site.name)))
    stage.attach(net)
    stage.set_total_steps(4)
    generator = torch.Generator().manual_seed(0)
    for layer in stage._layers:
        layer.score.data.normal_(generator=generator)
        layer.score.grad = torch.ones_like(layer.score)

    at = SimpleNamespace(trainer=SimpleNamespace(global_step=2), logits=lambda _: None, objective=lambda *_, **__: {})
    stage.losses(at, {})
    stage.before_step(net)
    groups = {True: [], False: []}
    for site, layer in zip(find_sites(net), stage._layers, strict=True):
        groups[site.role in ("up", "down")].append(layer.score.sigmoid().mean())
    formula = 3000.0 * (1 - 0.5**3) * sum(torch.stack(group).mean() for group in groups.values()) / 2  # half way
    expected = torch.autograd.grad(formula, [layer.score for layer in stage._layers])
    for layer, grad in zip(stage._layers, expected, strict=True):
        assert torch.allclose(layer.score.grad - 1, grad, atol=1e-5) and grad.abs().min() > 0.01


def test_soft_threshold_rises_and_a_miss_is_said(fit, dense, tmp_path):
    """tau from 0 to tau_f by the same cubic; without a penalty nothing falls below it, and the run says so."""
    seen = []

    def look(trainer, method):
        stage, step = method.stage, trainer.global_step
        seen.append(stage.status(method.net, step)["threshold"])
        for layer in layers(method):
            floor = int(0.005 * layer.out_features) + 1
            assert int(layer.mask.sum()) == max(floor, int((layer.score.sigmoid() > seen[-1]).sum()))

    method = fit(movement(form="soft", penalty=0.0, threshold=0.3), "prune", dense, look)
    assert seen[0] == 0.0 and seen[-1] == pytest.approx(0.3) and seen == sorted(seen)
    with pytest.warns(
        UserWarning, match=r"prune.penalty: 0.0 left \d\.\d+ of the weights, more than model.density 0.3"
    ):
        method.stage.finish(method.net, tmp_path)
    method = fit(
        movement(form="soft", penalty=1000.0, threshold=0.49, score_learning_rate=0.5), "prune", dense, max_epochs=2
    )
    assert share(method) < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.stage.finish(method.net, tmp_path)
