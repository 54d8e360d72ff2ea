"""Gates, multipliers and target together, on a loss that wants every unit."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
import torch

from lit_compress.numerics.hard_concrete import Size, kept_units
from lit_compress.stages.base import Stage
from lit_compress.stages.gated import GatedStage, GatedTraining
from lit_compress.utils.errors import UserError

SHAPES = {"heads": (2, 4), "neurons": (2, 30)}


class Toy(GatedStage):
    finest, clamp = "neurons", (-4.6, 4.6)

    def set_gates(self, net, z, deterministic=False):
        self.z = z


def toy(**settings):
    stage = Toy(GatedTraining(**settings), 0.4)
    parts = [
        (30, ("heads", 0)),
        (30, ("heads", 1)),
        (3, ("neurons", 0)),
        (3, ("neurons", 1)),
    ]
    stage.make_gates(Size(parts, SHAPES), 2.0)
    stage.attach(torch.nn.Linear(1, 1))
    stage.set_total_steps(200)
    return stage


class At:
    own_seed = step_seed = 0

    def __init__(self, step):
        self.trainer, self.global_step = self, step


def run(stage, steps, monkeypatch, start=0, optimizer=None):
    """Steps of the stage with a task that pays for every open unit, unequally."""
    monkeypatch.setattr(Stage, "losses", lambda self, *_: {"task": -0.02 * sum(
        (z * torch.linspace(0.1, 1, z.numel()).view_as(z)).sum() for z in self.z.values())})  # fmt: skip
    optimizer = optimizer or torch.optim.AdamW(stage.param_groups(None), fused=True)
    seen = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        sum(stage.losses(At(step), {}).values()).sum().backward()
        stage.before_step(stage._net[0])
        optimizer.step()
        stage.after_step(None, step + 1)
        seen.append(stage.status(None, step + 1))
    return seen, optimizer


def test_the_density_goes_to_the_target(monkeypatch):
    stage = toy(gate_learning_rate=0.05, multiplier_learning_rate=0.05, target_warmup=0.3)
    seen, _ = run(stage, 600, monkeypatch)
    assert seen[0]["target"] > 0.95 and seen[59]["target"] == seen[-1]["target"] == 0.4
    last = seen[400:]  # lambda swings the density around the target
    assert abs(sum(s["density"] for s in last) / 200 - 0.4) < 0.03 and max(abs(s["density"] - 0.4) for s in last) < 0.1
    assert abs(sum(s["actual"] for s in last) / 200 - 0.4) < 0.05
    quadratic = [s["lambda2"] for s in seen]
    assert all(b >= a for a, b in itertools.pairwise(quadratic)) and quadratic[-1] > 0
    assert all(gate.log_alpha.abs().max() <= 4.6 for gate in stage.gates.values())
    open_units = stage.gates["neurons"].log_alpha.flatten()
    assert open_units[30:].mean() > open_units[:30].mean()  # what pays more stays


def test_what_is_evaluated(monkeypatch):
    """Deterministic; as many units as expected before the target has arrived, then exactly the budget."""
    stage = toy()
    assert stage.kept_masks(10)["neurons"].sum(1).tolist() == kept_units(stage.gates["neurons"].log_alpha).tolist()
    assert not stage.at_budget(39) and stage.at_budget(40)
    assert not toy(target_warmup=0.0).at_budget(0) and toy(target_warmup=0.0).at_budget(1)
    masks, budget = stage.kept_masks(40), round(0.4 * stage.size.total)
    assert budget - 3 < stage.size.count(masks) <= budget
    stage.before_validation(None, 40)
    assert all(torch.equal(stage.z[name] > 0, masks[name]) for name in masks)
    again = dict(stage.z)
    stage.before_validation(None, 40)
    assert all(torch.equal(stage.z[name], again[name]) for name in again)


@pytest.mark.parametrize(
    ("log_alpha", "message"),
    [(2.0, "expect a density of 0.9.*0.4000 is kept; .* raise prune.multiplier_learning_rate"),
     (-3.0, "expect a density of 0.[12].*0.4000 is kept; .* raise prune.gate_learning_rate"), (-2.0, None)],
)  # fmt: skip
def test_gates_that_end_elsewhere_are_told(log_alpha, message):
    """At the end, and only where what is kept is not what they expect."""
    stage = toy()
    with torch.no_grad():
        for gate in stage.gates.values():
            gate.log_alpha.fill_(log_alpha)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        stage.before_validation(None, 199)
        assert not found
        stage.before_validation(None, 200)
    said = [str(warning.message) for warning in found]
    assert re.search(message, said[0]) if message else not said


def test_settings_are_checked():
    for wrong in ({"gate_learning_rate": 0.0}, {"multiplier_learning_rate": -1.0}, {"target_warmup": 1.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            GatedTraining(**wrong)


def test_own_groups_keep_rate_and_gradient(fit, dense):
    """A group may have a constant learning rate and stay out of the clipping, in a real fit."""
    from lit_compress.methods import Magnitude

    seen = []

    class Extra(Stage):
        def attach(self, net):
            self.gate = torch.nn.Parameter(torch.zeros(3))

        def param_groups(self, net):
            return [{"params": [self.gate], "lr": 0.5, "weight_decay": 0.0, "constant": True, "clip": False}]

        def losses(self, method, batch):
            return super().losses(method, batch) | {"extra": 100 * self.gate.sum()}

        def after_step(self, net, step):
            norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            seen.append((self.gate.grad.tolist(), float(norm)))

    class Method(Magnitude):
        def stages(self):
            return [Extra("prune", GatedTraining(epochs=1), distil=False)]

    rates = []
    fit(Method(backbone="unused"), "prune", dense, gradient_clip_val=1e-3,
        look=lambda trainer, _: rates.append([g["lr"] for g in trainer.optimizers[0].param_groups]))  # fmt: skip
    assert all(gradient == [100.0] * 3 and norm == pytest.approx(1e-3, rel=1e-2) for gradient, norm in seen)
    assert {rate[2] for rate in rates} == {0.5} and len({rate[0] for rate in rates}) > 5
