"""Blocks that recompute their activations take less memory and train the same weights."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.__main__ import main
from lit_compress.models.accounting import forward_bytes
from lit_compress.stages import recompute
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.recompute import activations, most_kept, surely_few


@pytest.mark.slow
def test_blocks_recompute_above_a_limit_only(short_run, tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr("lit_compress.methods.base.note", notes.append)
    monkeypatch.setattr(recompute, "MOST", 1000)
    own = ["--model.density", "0.5", "--model.retrain.parameters", "lora", "--model.retrain.lora.rank", "1"]
    main(["fit", "--model", "SVD", *own, *short_run, "--run_dir", str(tmp_path / "run")])
    assert [line.partition(":")[0] for line in notes if "recompute" in line] == ["dense", "retrain"]


def test_a_language_model_keeps_less():
    """Its losses over a vocabulary take memory of their own."""
    cpu = torch.device("cpu")
    assert 0 < most_kept(cpu, over_vocabulary=True) < most_kept(cpu, over_vocabulary=False)


def test_what_is_kept():
    net, stage = make_net("bert", num_hidden_layers=4), Stage("dense", Training())
    whole = forward_bytes(net, 8, 32, "parameters")
    assert activations(stage, net, (8, 32), False, None, whole) == (whole, False)
    kept, again = activations(stage, net, (8, 32), False, None, whole - 1)
    assert again and kept < whole / 2
    assert activations(stage, net, (8, 32), False, False, 0) == (whole, False)
    stage = type("Other", (Stage,), {})("dense", Training())
    assert activations(stage, net, (8, 32), False, True, 0) == (whole, False)
    assert surely_few(net, (8, 32), 10 * whole) and not surely_few(net, (8, 32), whole)


@pytest.mark.parametrize(("family", "task"), [("llama", "wikitext2"), ("bert", "sst2")])
def test_the_gradient_is_that_of_kept_activations(family, task):
    """With dropout, which is drawn once."""

    def gradients(again):
        net = make_net(family, task, dropout=0.1).train()
        if again:
            recompute.recompute(net)
        torch.manual_seed(0)
        ids = torch.arange(5, 21).view(2, 8)
        net(input_ids=ids, labels=ids if family == "llama" else torch.tensor([0, 1])).loss.backward()
        return {name: value.grad for name, value in net.named_parameters()}

    kept, made = gradients(False), gradients(True)
    assert all(torch.equal(value, made[name]) for name, value in kept.items())
