"""A step without finite gradients is left out: weights, moments and scores are what they were; the run can stop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lit_compress import methods
from lit_compress.__main__ import main
from lit_compress.run import callbacks
from lit_compress.run.callbacks import FiniteSteps
from lit_compress.utils.errors import UserError

OPTIONS: dict[str, dict[str, Any]] = {  # one of every class of stage
    "BlockMovement": {"block": 8}, "CoFi": {}, "ITP": {}, "LPAF": {}, "SP3": {},
    "PLATON": {"interval": 5, "start": 0.5}, "LoSparse": {"interval": 10},
}  # fmt: skip


class Poison(Callback):
    """Make one gradient of some steps infinite or no number, after backward."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step + 1 in self.steps:
            weights = [p for p in pl_module.net.parameters() if p.grad is not None]
            weights[trainer.global_step % len(weights)].grad.view(-1)[0] = (
                math.nan if trainer.global_step % 2 else math.inf
            )


def build(name: str):
    kind = getattr(methods, name)
    settings = type(kind(task="sst2", backbone="unused").prune)
    prune = settings(epochs=1, learning_rate=1e-3, **OPTIONS[name])
    return kind(task="sst2", backbone="unused", density=0.5, prune=prune)


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_poisoned(name, fit, dense, monkeypatch):
    """Every tensor of the checkpoint stays finite, the moments too; the net has its budget at the end."""
    method = build(name)
    steps, last = FiniteSteps(), []
    fit(
        method, "prune", dense, lambda trainer, _: last.append(trainer.optimizers[0].state_dict()["state"]),
        teacher=dense, callbacks=[Poison(2, 3, 7, 13), steps],
    )  # fmt: skip
    assert steps.skipped == 4 and method.stage.total_steps == 13
    for tensor in method.state_dict().values():
        assert not tensor.isnan().any() and not (tensor == math.inf).any()
    for moments in last[-1].values():
        assert all(torch.as_tensor(value).isfinite().all() for value in moments.values())
    assert method.stage.at_budget(13)


def test_a_step_that_is_left_out_moves_nothing(fit, dense):
    seen = []

    def look(trainer, method):
        seen.append({name: value.detach().clone() for name, value in method.net.named_parameters()})

    fit(build("ITP"), "prune", dense, look, callbacks=[Poison(5), FiniteSteps()])
    before, after, later = seen[3], seen[4], seen[5]
    stays = [name for name in before if torch.equal(before[name], after[name])]
    assert len(stays) == len(before) or all("layer" in name for name in before.keys() - stays)  # pruned, not trained
    assert all((after[name] == before[name]).logical_or(after[name] == 0).all() for name in before)
    assert any(not torch.equal(later[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["LPAF", "LoSparse", "PLATON"])
def test_scores_stay(name, fit, dense):
    seen = []

    def look(trainer, method):
        seen.append({n: b.detach().clone() for n, b in method.stage.named_buffers() if b.numel()})

    fit(build(name), "prune", dense, look, teacher=dense, callbacks=[Poison(4), FiniteSteps()])
    assert any(not torch.equal(seen[1][n], seen[2][n]) for n in seen[1])
    assert not [n for n in seen[2] if not torch.equal(seen[2][n], seen[3][n])]


def test_too_many_in_a_row_stop_the_run(fit, dense, monkeypatch):
    monkeypatch.setattr(callbacks, "MOST_SKIPPED", 2)
    with pytest.raises(
        UserError, match=r"2 steps in a row were not finite, the last in step 6; try a smaller .*learning_rate"
    ):
        fit(build("ITP"), "prune", dense, callbacks=[Poison(2, 5, 6), FiniteSteps()])


def test_a_rank_may_hold_nothing_of_a_weight():
    """FSDP2 gives a rank an empty part of a weight that has fewer rows than there are ranks."""
    empty, weight = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(3))
    empty.grad, weight.grad = torch.zeros(0, 4), torch.tensor([0.0, 1.0, 2.0])
    optimizer = torch.optim.SGD([empty, weight], lr=0.1)
    assert callbacks._finite(optimizer, torch.device("cpu"))
    weight.grad[1] = math.nan
    assert not callbacks._finite(optimizer, torch.device("cpu"))


def test_a_run_that_diverges_is_one_line(short_run, tmp_path, capsys):
    args = ["fit", "--model", "SVD", *short_run, "--model.dense.learning_rate", "1e30"]
    with pytest.raises(SystemExit) as stop:
        main([*args, "--run_dir", str(tmp_path / "run")])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and line.startswith("error: model.dense: loss or gradients of 20 steps in a row")
    assert not (tmp_path / "run" / "stages.json").exists()


class PoisonThird(Poison):
    """Of every stage."""

    def __init__(self) -> None:
        super().__init__(3)
