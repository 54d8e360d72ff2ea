"""A stage's number of steps; its AdamW: who decays, who has settings of its own, how the learning rates go."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.stages.base import Stage, Training, build_adamw, build_schedule, count_steps


class OwnGroup(Stage):
    """A stage that gives the head's bias a constant learning rate of its own."""

    def param_groups(self, net):
        return [{"params": [net.classifier.bias], "lr": 0.5, "weight_decay": 0.0, "constant": True}]


@pytest.fixture
def net():
    found = make_net("bert")
    found.bert.pooler.requires_grad_(False)
    return found


def test_every_trained_parameter_is_in_one_group_and_only_matrices_decay(net):
    stage = OwnGroup("x", Training(weight_decay=0.1))
    groups = build_adamw(stage, net, "32-true").param_groups
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])
    assert groups[2]["params"][0] is net.classifier.bias


def test_schedule_rises_falls_and_leaves_constant_groups(net):
    stage = OwnGroup("x", Training(learning_rate=1.0, warmup=0.15))
    stage.set_total_steps(10)  # 0.15 * 10 steps, rounded up: 2 of warm-up
    optimizer = build_adamw(stage, net, "32-true")
    schedule = build_schedule(stage, optimizer)["scheduler"]
    rates = []
    for _ in range(11):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    decayed, plain, own = zip(*rates, strict=True)
    assert decayed == plain == pytest.approx([0, 0.5, *torch.linspace(1, 0, 9).tolist()])
    assert set(own) == {0.5}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_float16_gradients_are_not_unscaled_inside_the_step(net, precision):
    optimizer = build_adamw(Stage("x", Training()), net, precision)
    assert bool(optimizer.defaults["fused"]) == (precision != "16-mixed")
    if precision == "bf16-mixed":
        assert optimizer._step_supports_amp_scaling is False


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(None, 1030), (100, 1000), (100.0, 1000), (200, 1030), (200.0, 1030), (1, 10), (1.0, 1030), (0.5, 510)],
)
def test_a_limit_is_a_number_of_steps_or_a_fraction_of_at_most_one(limit, steps):
    assert count_steps(103, epochs=10, limit=limit) == steps


def test_most_steps():
    assert count_steps(103, epochs=10, max_steps=100) == 100
