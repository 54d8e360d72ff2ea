"""Blocks that recompute their activations take less memory and train the same weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_net

from lit_compress.__main__ import main
from lit_compress.models.accounting import forward_bytes
from lit_compress.stages import recompute
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.recompute import activations, most_kept, surely_few


@pytest.mark.parametrize("method", ["SVD", "LPAF"])
def test_the_weights_are_the_same(method, short_run, tmp_path, monkeypatch):
    """With dropout and hidden states of a teacher; in the stages that can: LPAF's last one throws coins."""
    done = []
    monkeypatch.setattr("lit_compress.methods.base.recompute", lambda net: (done.append(net), recompute.recompute(net)))
    epochs, found = ["--model.prune.epochs", "1"] if method == "LPAF" else [], {}
    for again in ("true", "false"):
        run = tmp_path / again
        main(["fit", "--model", method, "--model.density", "0.5", *short_run, *epochs, "--model.recompute", again,
              "--run_dir", str(run)])  # fmt: skip
        found[again] = load_file(run / "export" / "model.safetensors")
    assert len(done) == 2
    assert all(torch.equal(value, found["false"][name]) for name, value in found["true"].items())


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


def test_the_gradient_is_that_of_kept_activations():
    def gradients(again):
        net = make_net("llama", "wikitext2").train()
        if again:
            recompute.recompute(net)
        ids = torch.arange(5, 21).view(2, 8)
        net(input_ids=ids, labels=ids).loss.backward()
        return {name: value.grad for name, value in net.named_parameters()}

    kept, made = gradients(False), gradients(True)
    assert all(torch.equal(value, made[name]) for name, value in kept.items())
