"""CoFi: matched layers, gated training of a tiny net, the cut, what is refused."""

from __future__ import annotations

import itertools
from math import inf

import pytest
import torch
from helpers import evaluated as logits
from tiny import make_net
from torch import Tensor

from lit_compress.layers import Removed
from lit_compress.methods import CoFi
from lit_compress.methods.cofi.cofi import (
    CoFiDistillation,
    CoFiPruning,
    MatchedLayers,
    match_layers,
    open_layers,
    quarters,
)
from lit_compress.models import accounting as budget
from lit_compress.models.cut import cut_closed
from lit_compress.models.sites import embedding_params
from lit_compress.models.storage import load_net, save_net
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_match(distances: list[list[float]], exists: list[bool]) -> list[int]:
    """From the last teacher layer down: the nearest existing student layer before the last choice; -1 for none."""
    last, chosen = len(distances), []
    for column in reversed(range(len(distances[0]))):
        best, found = inf, -1
        for layer in range(len(distances)):
            if exists[layer] and layer < last and distances[layer][column] < best:
                best, found = distances[layer][column], layer
        chosen.append(found)
        last = last if found < 0 else found
    return chosen[::-1]


def test_matching_is_the_loop_and_never_a_removed_layer():
    """All 2^6 sets of removed layers: in order, none that is removed (the published program takes those)."""
    distances = draw(6, 4).abs()
    for exists in itertools.product((False, True), repeat=6):
        chosen, valid = match_layers(distances, torch.tensor(exists))
        assert chosen.where(valid, -1).tolist() == naive_match(distances.tolist(), list(exists))
        found = chosen[valid].tolist()
        assert all(exists[layer] for layer in found) and found == sorted(set(found))


def test_quarters():
    assert (quarters(12), quarters(6), quarters(4), quarters(2), quarters(1)) == (
        [2, 5, 8, 11], [1, 2, 4, 5], [0, 1, 2, 3], [0, 1], [0],
    )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_matched_layers_are_the_formula(masked):
    student, teacher = [draw(3, 5, 8, seed=i) for i in range(7)], [draw(3, 5, 8, seed=9 + i) for i in range(13)]
    mask = torch.ones(3, 5)
    mask[1, 2:] = 0
    real = (mask if masked else torch.ones(3, 5)) != 0
    layers = MatchedLayers(8, 8)
    layers.exists = torch.tensor([True, True, False, True, False, True])
    loss = layers(student, teacher, mask if masked else None)
    distances = [[(s - teacher[1 + t])[real].square().mean().item() for t in (2, 5, 8, 11)] for s in student[1:]]
    chosen = naive_match(distances, layers.exists.tolist())
    expected = sum(distances[s][t] for t, s in enumerate(chosen) if s >= 0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert layers.projection.weight.grad.abs().sum() > 0
    layers.exists = torch.zeros(6, dtype=torch.bool)
    assert layers(student, teacher, None).item() == 0
    assert "exists" not in layers.state_dict()


def test_projection_follows_the_cut():
    layers = MatchedLayers(8, 8)
    layers.exists = torch.ones(2, dtype=torch.bool)
    with torch.no_grad():
        layers.projection.weight.copy_(draw(8, 8))
    open_ = torch.tensor([True, False, True, True, False, True, True, True])
    student, teacher = [draw(2, 3, 8, seed=i) * open_ for i in range(3)], [draw(2, 3, 8, seed=5 + i) for i in range(3)]
    before = layers(student, teacher, None)
    layers.shrink(open_)
    assert torch.allclose(layers([s[..., open_] for s in student], teacher, None), before, rtol=1e-5)


def method(density=0.5, distillation=None, **settings):
    given = {"epochs": 2, "learning_rate": 1e-3, "warmup": 0.0, "target_warmup": 0.4, "init": "finetuned"} | settings
    return CoFi(backbone="unused", density=density, prune=CoFiPruning(**given),
                retrain=Training(epochs=1), distillation=distillation or CoFiDistillation())  # fmt: skip


def test_stages():
    names = [stage.name for stage in CoFi().stages()]
    assert names == ["dense", "distil", "prune", "retrain"]
    assert [stage.name for stage in method().stages()] == ["dense", "prune", "retrain"]
    assert CoFi().stages()[1].from_backbone and not any(stage.from_backbone for stage in CoFi().stages()[2:])


def test_gated_training_cut_and_retraining(fit, dense, tmp_path):
    """One short run: constant rates, clamped gates, frozen embeddings, target met, cut == evaluated, projection."""
    seen = []

    def look(trainer, module):
        groups = trainer.optimizers[0].param_groups
        seen.append(([g["lr"] for g in groups], module.stage.status(module.net, trainer.global_step)))
        scores.append(module.stage.at_budget(trainer.global_step))

    scores = []
    done = fit(method(), "prune", dense, look=look, teacher=dense)
    stage, net = done.stage, done.net
    rates = [rate for rate, _ in seen]
    gates, multipliers = ([r[i] for r in rates] for i in (2, 3))
    assert set(gates) == set(multipliers) == {1e-2} and rates[0][0] > rates[-1][0]
    warmup = round(0.4 * len(seen))
    assert scores.index(True) == warmup - 1 and all(scores[warmup:])  # no epoch before may be the best
    assert seen[0][1]["target"] > 0.9 and seen[-1][1]["target"] == 0.5
    assert all(value.abs().max() <= 4.6052 for value in stage.log_alphas.values())
    before = load_net(dense)
    assert all(torch.equal(a, b) for a, b in zip(embedding_params(before), embedding_params(net), strict=True))
    assert not torch.equal(before.classifier.weight, net.classifier.weight)
    stage.before_validation(net, stage.total_steps)
    expected = logits(net)
    folder = tmp_path / "cut"
    folder.mkdir()
    stage.deploy(net)
    stage.finish(net, folder)
    assert torch.allclose(logits(net), expected, atol=1e-5)
    assert 0.495 < budget.stored_density(net) <= 0.5
    save_net(net, folder)
    again = fit(method(), "retrain", folder, teacher=dense)
    assert torch.equal(again.stage.matching.exists, open_layers(load_net(folder)))
    assert again.stage.matching.projection.in_features == again.net.bert.embeddings.LayerNorm.weight.numel()


def test_open_layers_and_existing_ones():
    net = make_net("bert", num_hidden_layers=3)
    z = {"attention_layer": torch.tensor([[0.0], [0.5], [0.0]]), "ffn_layer": torch.tensor([[0.0], [0.0], [0.3]])}
    assert open_layers(net, z).tolist() == [False, True, True]
    assert open_layers(net, {"heads": torch.ones(3, 4)}).tolist() == [True] * 3
    cut_closed(net, z)
    assert open_layers(net).tolist() == [False, True, True] and any(isinstance(m, Removed) for m in net.modules())


@pytest.mark.parametrize(
    ("family", "density", "words"),
    [("bert", 1e-6, ["model.density", " to 0.99", "heads, neurons, hidden"]), ("albert", 0.5, ["albert"])],
)
def test_what_cannot_be_gated_is_refused(family, density, words):
    stage = method(density=density).stages()[1]
    with pytest.raises(UserError) as error:
        stage.check(make_net(family))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_settings_are_checked():
    with pytest.raises(UserError, match="warmup"):
        CoFiPruning(target_warmup=1.5)
    assert isinstance(CoFi().retrain, Training)
