"""Arguments of the Trainer that could only fail later are refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, LearningRateFinder, Timer

from lit_compress.run.trainer import PlainFiles, check_trainer, make_trainer, read_checkpoint
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError, require


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("precision", "16-true", "nearest valid 16-mixed"),
        ("precision", "bf16-true", "nearest valid bf16-mixed"),
        ("precision", "64-true", "scores and gates are in 32 bits; nearest valid 32-true"),
        ("gradient_clip_val", -1.0, "-1.0 turns the gradients around; nearest valid 0, no clipping"),
        ("accumulate_grad_batches", 0, "0 is below 1, the smallest valid value"),
        ("accumulate_grad_batches", -1, "-1 is below 1, the smallest valid value"),
        ("val_check_interval", 0, "0 leaves nothing to do"),
        ("limit_val_batches", 0, "0 leaves nothing to do"),
        ("limit_val_batches", 0.0, "0 leaves nothing to do"),
        ("limit_train_batches", 0, "0 leaves nothing to do"),
        ("max_steps", 0, "0 leaves nothing to do"),
        ("limit_val_batches", 10**30, "the largest valid value"),
        ("check_val_every_n_epoch", 0, "nearest valid 1"),
        ("check_val_every_n_epoch", 2, "every epoch is validated; nearest valid 1"),
    ],
)
def test_what_cannot_work_is_one_line(option, value, message):
    with pytest.raises(UserError, match=message) as error:
        check_trainer({option: value})
    assert str(error.value).startswith(f"trainer.{option}")


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision": "bf16-mixed", "limit_val_batches": 1.0, "max_steps": -1, "check_val_every_n_epoch": 1},
        {"precision": None, "limit_train_batches": 0.1, "max_steps": 5, "check_val_every_n_epoch": None},
        {},
    ],
)
def test_what_works_is_let_through(arguments):
    check_trainer(arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_setting_that_is_no_number_is_refused(value):
    with pytest.raises(UserError, match=r"learning_rate: -?(nan|inf) is not a finite number; e.g. 2e-5"):
        Training(learning_rate=value)
    with pytest.raises(UserError, match=r"share: .* is not a finite number; nearest valid 0"):
        require(SimpleNamespace(share=value), "share", low=0)


def test_checkpoints_of_a_users_own_plugin_stay(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "enable_progress_bar": False}
    assert isinstance(make_trainer(**quiet).strategy.checkpoint_io, PlainFiles)
    own = PlainFiles()
    assert make_trainer(**quiet, plugins=[own]).strategy.checkpoint_io is own


def test_a_trainer_leaves_the_users_callbacks_alone(tmp_path):
    """Lightning appends its bar to the list that it is given; the next Trainer of a run would have two."""
    users = [Timer()]
    make_trainer(callbacks=users, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    assert [type(one) for one in users] == [Timer]


def test_a_checkpoint_callback_is_one_line():
    from lightning.pytorch.callbacks import ModelCheckpoint

    with pytest.raises(UserError, match=r"trainer.callbacks: ModelCheckpoint: a stage keeps checkpoints of its own"):
        make_trainer(callbacks=[ModelCheckpoint()], logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize(
    "callback",
    [EMAWeightAveraging(), GradientAccumulationScheduler({0: 2}), LearningRateFinder()],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_callback_that_changes_steps_or_weights_is_one_line(callback, listed):
    """The metrics of averaged weights were written next to the others, and half of the steps were left out."""
    with pytest.raises(UserError, match=rf"trainer.callbacks: {type(callback).__name__}: a stage sets its batches, s"):
        make_trainer(callbacks=[callback] if listed else callback, logger=False, enable_checkpointing=False,
                     accelerator="cpu")  # fmt: skip


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path):
    path, touched = tmp_path / "last.ckpt", tmp_path / "touched"
    torch.save({"state_dict": {}, "callbacks": _Touch(touched)}, path)
    with pytest.raises(UserError, match="is not a readable checkpoint"):
        read_checkpoint(path)
    assert not touched.exists()
