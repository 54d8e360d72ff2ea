"""Blocks that recompute their activations take less memory and train the same weights."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.__main__ import main
from lit_compress.methods import ITP, BlockMovement, CoFi, Movement
from lit_compress.models.accounting import forward_bytes
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.recompute import activations, recompute, recomputes
from lit_compress.stages.rows import RowPruning
from lit_compress.stages.unstructured import CubicSchedule


@pytest.mark.slow
def test_blocks_recompute_if_a_user_asks(short_run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("lit_compress.methods.base.recompute", asked.append)
    fit = ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir"]
    main([*fit, str(tmp_path / "kept")])
    assert asked == []
    main([*fit, str(tmp_path / "again"), "--model.recompute", "true"])
    assert len(asked) == 2  # dense, retrain


def test_what_is_kept():
    net, stage = make_net("bert", num_hidden_layers=4), Stage("dense", Training())
    whole = forward_bytes(net, 8, 32, "parameters")
    assert activations(stage, net, (8, 32), False, False) == whole
    assert recomputes(stage, net, True) and activations(stage, net, (8, 32), False, True) < whole / 2
    stage = type("Other", (Stage,), {})("dense", Training())
    assert not recomputes(stage, net, True) and activations(stage, net, (8, 32), False, True) == whole


@pytest.mark.parametrize(("family", "task"), [("llama", "wikitext2"), ("bert", "sst2")])
def test_the_gradient_is_that_of_kept_activations(family, task):
    """With dropout, which is drawn once."""

    def gradients(again):
        net = make_net(family, task, dropout=0.1).train()
        if again:
            recompute(net)
        torch.manual_seed(0)
        ids = torch.arange(5, 21).view(2, 8)
        net(input_ids=ids, labels=ids if family == "llama" else torch.tensor([0, 1])).loss.backward()
        return {name: value.grad for name, value in net.named_parameters()}

    kept, made = gradients(False), gradients(True)
    assert all(torch.equal(value, made[name]) for name, value in kept.items())


@pytest.mark.parametrize(
    ("method", "stage", "settings"),
    [
        (ITP, "prune", {"prune": RowPruning(epochs=1, init="finetuned")}),
        (Movement, "prune", {"prune": CubicSchedule(epochs=1)}),
        (BlockMovement, "retrain", {"retrain": Training(epochs=1)}),
        (CoFi, "retrain", {"retrain": Training(epochs=1)}),
    ],
)
def test_stages_that_draw_nothing_recompute(method, stage, settings, fit, dense, monkeypatch):
    asked = []

    def trained(again):
        made = method(backbone="unused", recompute=again, **settings)
        return fit(made, stage, dense, teacher=dense).net.state_dict()

    monkeypatch.setattr("lit_compress.methods.base.recompute", lambda net: asked.append(recompute(net)))
    kept, made = trained(False), trained(True)
    assert len(asked) == 1 and all(torch.equal(value, made[name]) for name, value in kept.items())
