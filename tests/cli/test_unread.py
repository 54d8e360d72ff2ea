"""An option that a command does not read is an error; the table of what it reads is compared with what it does."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from inspect import signature
from typing import get_args

import pytest
import torch
from mistakes import fails

from lit_compress import methods
from lit_compress.cli.catalogue import names
from lit_compress.cli.factorizing import one_shot_stage, only_with_distil
from lit_compress.cli.words import SHORT, check_names, is_read, take_apart
from lit_compress.run.settle import check_sizes
from lit_compress.stages.base import Training
from lit_compress.utils.errors import UserError

ONE_SHOT = ("SVD", "FWSVD", "SecondOrder", "LLMPruner", "SliceGPT", "Layers")
COMMANDS = ("factorize", "evaluate", "predict", "bench", "export")
OTHER = {  # values that are valid, and are not the default
    "density": 0.6, "rank": 3, "rank_ratio": 0.4, "budget": "density=0.3", "round_to": 8, "shape": "uniform",
    "teacher": "other", "recompute": True,
    "removes": "components", "allocation": "uniform", "scope": "all",
    "weighting": "none",
    "optimizer": torch.optim.SGD, "lr_scheduler": torch.optim.lr_scheduler.LinearLR,
}  # fmt: skip


def other(option, default, hint):
    """Return a valid value that is not the default; None if the option is a whole group."""
    if option in OTHER and OTHER[option] != default:
        return OTHER[option]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1 if isinstance(default, int) else default / 2
    choices = [v for v in get_args(hint) if isinstance(v, str) and v != default]
    return choices[0] if choices else 7


def compression(method):
    """Return all that `factorize` may read of a method, besides the training of its last stage."""
    stage = one_shot_stage(method)
    training = {f.name for f in fields(Training)}
    kept = {f.name: getattr(stage.settings, f.name) for f in fields(stage.settings) if f.name not in training}
    step, sizes = stage.compression, ("density", "round_to", "shape")
    common = signature(methods.Method).parameters.keys() - set(sizes)
    own = {n: getattr(step, n, None) for n in step.given} if isinstance(step, methods.Method) else vars(step)
    state = {name: value for name, value in own.items() if name not in {"settings", "prune", *common}}
    return str((state, kept, method.backbone, method.budget, method.rule))


@pytest.mark.parametrize("name", ONE_SHOT)
def test_factorize_reads_what_it_says(name):
    """Every option of a method: it changes the compression, or it is refused."""
    kind = getattr(methods, name)
    plain, wrong = compression(kind()), {}
    for option, parameter in signature(kind).parameters.items():
        group = parameter.default if is_dataclass(parameter.default) else None
        for field in fields(group) if group else (None,):
            if option in ("task", "backbone", "teacher"):  # the command's; the vectors that a dev metric compares with
                continue
            shown = f"model.{option}.{field.name}" if field else f"model.{option}"
            if only_with_distil(shown):
                assert is_read("factorize", shown)
                continue
            default = getattr(group, field.name) if field else parameter.default
            if is_dataclass(default):
                assert not is_read("factorize", shown)
                continue
            try:
                value = other(shown.rpartition(".")[2], default, field.type if field else parameter.annotation)
                check_sizes(method := kind(**{option: replace(group, **{field.name: value}) if field else value}))
                changed = compression(method) != plain
            except UserError as error:  # it does not go with others, or they say that nothing reads it
                changed = "has no effect" not in str(error) or is_read("factorize", shown)
            if changed != is_read("factorize", shown):
                wrong[shown] = changed
    assert wrong == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_read_or_refused_by_name(command):
    options = names()
    read = [option for option in options if is_read(command, option)]
    assert {"data.path", "trainer.accelerator", "seed_everything"} <= {*read}
    refused = [option for option in options if option not in read]
    assert {"trainer.max_epochs", "model.dense.epochs", "run_dir", "ckpt_path"} <= {*refused}
    for option in refused:
        near = "nearest: eval_batch_size" if option == "data.batch_size" else "leave it out"
        with pytest.raises(UserError, match=f"^{option}: {command} does not read it; {near}"):
            check_names(command, [(option, "{")], None)


def test_short_options_are_read():
    assert all(is_read("factorize", option) for option in SHORT.values())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--trainer.gradient_clip_val", "5"], "trainer.gradient_clip_val"),
        (["--refine", "5", "--model.distillation.alpha", "0.1"], "model.distillation.alpha"),
        (["--checkpoint_every", "5"], "checkpoint_every"),
        (["--distil", "5", "--trainer.max_steps=4"], "trainer.max_steps"),
        (["--distil", "5", "--trainer.max_epochs=4"], "trainer.max_epochs"),
        (["--distil", "5", "--model.init_args.retrain.learning_rate", "0.1"], "model.retrain.learning_rate"),
        (["--trainer.precision", "bf16-mixed"], "trainer.precision"),
        (["--model.retrain.optimizer", "torch.optim.SGD"], "model.retrain.optimizer"),
        (["--run_dir", "x"], "run_dir"),
    ],
)
def test_factorize_refuses_options_without_effect_in_one_line(words, option, tiny_backbone, tmp_path, capsys):
    line = fails(capsys, "factorize", tiny_backbone, tmp_path / "out", "--data.task", "sst2", *words)
    assert line.startswith(f"error: {option}: factorize ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "value"), [("min_steps", "5"), ("enable_checkpointing", "False")])
@pytest.mark.parametrize("command", ["fit", "plan"])
def test_arguments_of_the_trainer_without_effect_are_refused(command, option, value, capsys):
    line = fails(capsys, command, "--config", "svd_sst2.yaml", f"--trainer.{option}", value)
    assert line.startswith(f"error: trainer.{option}: {value} has no effect")


def test_names_are_those_of_a_config():
    words = ["--device=cpu", "--model.init_args.density", "-0.5", "-c", "a.yaml"]
    assert take_apart("fit", words).names == ["trainer.accelerator", "model.density", "config"]
