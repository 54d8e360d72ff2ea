"""Training with rounded weights: gradients there, steps of the exact ones, and a model that a program keeps."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from tiny import make_net

from lit_compress.models.sites import blocks
from lit_compress.numerics.rounding import rounded
from lit_compress.stages import rounded as stages
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.compression import Compression

IDS = torch.arange(12).view(2, 6)


def matrices(net):
    return [p for *_, block in blocks(net) for p in block.parameters() if p.ndim == 2 and p.shape[1] % 4 == 0]


def test_a_step_has_the_gradient_at_the_rounded_weights(monkeypatch):
    """Of two micro-batches; norms, the tables and the head are not rounded."""
    monkeypatch.setattr(stages, "GROUP", 4)
    monkeypatch.setattr(Stage, "losses", lambda self, method, ids: {"loss": method.net(ids).logits.square().mean()})
    net = make_net("llama", "plain_text")
    stage, method = stages.RoundedStage("x", Training(), Compression()), SimpleNamespace(net=net)
    expected, exact = copy.deepcopy(net), copy.deepcopy(net.state_dict())
    for value in (of_blocks := matrices(expected)):
        value.data = rounded(value.data, 4)
    assert of_blocks and not torch.equal(of_blocks[0], matrices(net)[0])
    for ids in IDS:
        stage.losses(method, ids[None])["loss"].backward()
        expected(ids[None]).logits.square().mean().backward()
    stage.before_step(net)
    assert all(torch.equal(value, exact[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        for (name, value), other in zip(net.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(value.grad, other.grad), name
            value -= 0.1 * value.grad
    after = [value.detach().clone() for value in matrices(net)]
    assert not stages.is_rounded(net)
    for _ in range(2):
        stage.before_validation(net, 1)
        assert stages.is_rounded(net)
        assert all(torch.equal(v, rounded(old, 4)) for v, old in zip(matrices(net), after, strict=True))
    stage.losses(method, IDS)
    stage.before_step(net)
    assert all(map(torch.equal, matrices(net), after))
    stage.keep_untrained(net)
    assert all(map(torch.equal, matrices(net), after))
    stage.before_validation(net, 1)
    for value in matrices(sparse := copy.deepcopy(net)):  # pruned to a value of a group, which is its own rounding
        value.data = value.data * (torch.arange(value.shape[1]) % stages.GROUP == 0)
    assert not stages.is_rounded(sparse)
    monkeypatch.setattr(stages, "GROUP", 64)  # wider than some matrices: a program would round these untrained
    assert not stages.is_rounded(net)
