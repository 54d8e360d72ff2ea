"""Movement pruning of rows: schedule, budget, own learning rate."""

import pytest
import torch
from helpers import taken_out

from lit_compress.export.fuse import fuse
from lit_compress.methods import Movement
from lit_compress.models.accounting import count_params, dense_site_params
from lit_compress.models.sites import find_sites
from lit_compress.numerics.masks import keep_count, select_rows
from lit_compress.stages.unstructured import CubicSchedule


def movement(density=0.3, **settings):
    ramp = {"epochs": 2, "learning_rate": 1e-3, "start": 0.2, **settings}
    return Movement(backbone="unused", density=density, prune=CubicSchedule(**ramp))


def layers(method):
    return [method.net.get_submodule(site.name) for site in find_sites(method.net)]


def share(method):
    """The stored share of the weights, counted in the export."""
    net = taken_out(method.net)
    return count_params(fuse(net)).sites / dense_site_params(net)


def test_masks_follow_the_schedule(fit, dense):
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

    fit(movement(weight_decay=0.1), "prune", dense, look)
    assert all(a == b and c == pytest.approx(10 * a) for a, b, c in rates) and max(c for *_, c in rates) > 0.0075


def test_no_rate_of_the_scores_changes_a_mask(fit, dense, monkeypatch):
    """The masks follow from the order of the scores, which start at 0; so the rate is no option."""

    def trained():
        return {
            name: value for name, value in fit(movement(), "prune", dense).net.named_parameters() if "score" not in name
        }

    usual = trained()
    monkeypatch.setattr("lit_compress.stages.movement.SCORE_RATE", 0.08)
    assert all(torch.equal(value, usual[name]) for name, value in trained().items())
