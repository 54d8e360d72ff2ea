"""A stage's number of steps; its optimizer: who decays, who has settings of its own, how the learning rates go."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import make_net
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from transformers import Adafactor

from lit_compress.api.functions import _of_method
from lit_compress.cli.lines import read_line
from lit_compress.cli.options import CommandLine
from lit_compress.cli.words import from_python
from lit_compress.methods import SVD
from lit_compress.run.folder import Run
from lit_compress.stages.base import Stage, Training, build_optimizer, build_schedule, count_steps
from lit_compress.stages.gated import GatedTraining
from lit_compress.utils.errors import UserError

ExponentialHalf = partial(ExponentialLR, gamma=0.5)


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
    groups = build_optimizer(stage, net, "32-true").param_groups
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])
    assert groups[2]["params"][0] is net.classifier.bias


def test_schedule_rises_falls_and_leaves_constant_groups(net):
    stage = OwnGroup("x", Training(learning_rate=1.0, warmup=0.15))
    stage.set_total_steps(10)  # 0.15 * 10 steps, rounded up: 2 of warm-up
    optimizer = build_optimizer(stage, net, "32-true")
    schedule = build_schedule(stage, optimizer)["scheduler"]
    rates = []
    for _ in range(11):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    decayed, plain, own = zip(*rates, strict=True)
    assert decayed == plain == pytest.approx([0, 0.5, *torch.linspace(1, 0, 9).tolist()])
    assert set(own) == {0.5}


def test_another_optimizer_and_schedule(net):
    """Their options are their own; biases have no decay, and a stage's own group keeps its settings."""
    sgd = partial(torch.optim.SGD, lr=0.25, weight_decay=0.1)
    stage = OwnGroup("x", Training(optimizer=sgd, lr_scheduler=ExponentialHalf))
    optimizer = build_optimizer(stage, net, "bf16-mixed")
    schedule = build_schedule(stage, optimizer)["scheduler"]
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [
        (0.1, 0.25), (0.0, 0.25), (0.0, 0.5)
    ]  # fmt: skip
    parameters = [group["params"][0] for group in optimizer.param_groups]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    expected = [before[0] - 0.25 * (1 + 0.1 * before[0]), before[1] - 0.25, before[2] - 0.5]
    assert all(torch.allclose(a, b) for a, b in zip(parameters, expected, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125, 0.25]


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        (Training, {"optimizer": partial(torch.optim.SGD, lr=-1.0)}, "optimizer: Invalid learning rate: -1.0"),
        (Training, {"optimizer": torch.optim.LBFGS}, "optimizer: LBFGS doesn't support per-parameter options"),
        (Training, {"lr_scheduler": ExponentialLR}, "lr_scheduler: .* missing 1 required positional argument: 'gamma'"),
        (Training, {"lr_scheduler": ReduceLROnPlateau}, "ReduceLROnPlateau waits for a metric"),
        (Training, {"optimizer": torch.optim.SparseAdam}, "optimizer: SparseAdam does not support dense gradients"),
        (Training, {"lr_scheduler": partial(StepLR, step_size=0)}, "lr_scheduler: integer modulo by zero"),
        (GatedTraining, {"optimizer": Adafactor}, "prune.optimizer: its class has no `maximize`"),
        (GatedTraining, {"lr_scheduler": ExponentialHalf}, "prune.lr_scheduler: it would change"),
    ],
)
def test_a_class_that_cannot_train_a_stage_is_refused_at_once(kind, options, line):
    with pytest.raises(UserError, match=line):
        kind(**options)


def test_a_schedule_of_fewer_steps_is_refused_before_the_first_one():
    stage = Stage("x", Training(lr_scheduler=partial(OneCycleLR, max_lr=0.01, total_steps=10)))
    stage.set_total_steps(10)
    with pytest.raises(UserError, match=r"lr_scheduler\.total_steps: 10 is below the 26 steps .*; nearest valid 26"):
        stage.set_total_steps(26)


def test_a_stage_is_trained_by_its_optimizer(fit, dense):
    settings = Training(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.5), lr_scheduler=ExponentialHalf)
    rates = []
    method = fit(
        SVD(backbone="unused", density=0.5, retrain=settings), "retrain", dense, max_steps=3, teacher=dense,
        look=lambda trainer, _: rates.append(trainer.optimizers[0].param_groups[0]["lr"]),
    )  # fmt: skip
    assert type(method.trainer.optimizers[0]) is torch.optim.SGD and rates == [0.25, 0.125, 0.0625]


def test_a_run_goes_on_with_its_optimizer_only(short_run, tmp_path):
    at = short_run.index("--model.retrain.learning_rate")
    words = ["fit", "--model", "SVD", *short_run[:at], *short_run[at + 2 :], "--run_dir", str(tmp_path / "run")]
    words += ["--model.retrain.optimizer", "torch.optim.SGD", "--model.retrain.optimizer.lr"]
    first, other = (CommandLine(read_line("fit", [*words[1:], rate])).dump() for rate in ("0.01", "0.1"))
    assert first["model"]["init_args"]["retrain"]["optimizer"]["init_args"]["lr"] == 0.01
    (run := Run(tmp_path)).begin(first)
    run.check_same(first)
    with pytest.raises(UserError, match=r"model.retrain.optimizer.lr was 0.01, now 0.1; give the same config"):
        run.check_same(other)


def test_a_class_may_come_behind_its_options(tiny_backbone):
    words = ["--model", "SVD", "--model.backbone", str(tiny_backbone), "--data.task", "sst2"]
    words += ["--model.retrain.optimizer.lr", "0.01", "--model.retrain.optimizer", "torch.optim.SGD"]
    made = CommandLine(read_line("fit", words)).build().method.retrain
    assert made.tried().defaults["lr"] == 0.01


def test_an_optimizer_from_python():
    settings = Training(optimizer=partial(torch.optim.SGD, lr=0.5), lr_scheduler=LinearLR)
    given = _of_method(SVD(task="sst2", retrain=settings)) | {"data.task": "sst2"}
    made = CommandLine(from_python("fit", given)).build().method.retrain
    optimizer = made.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD and optimizer.defaults["lr"] == 0.5
    assert type(made.lr_scheduler(optimizer)) is LinearLR


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_float16_gradients_are_not_unscaled_inside_the_step(net, precision):
    optimizer = build_optimizer(Stage("x", Training()), net, precision)
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
