"""Which options a command reads. One that it does not read would have no effect, so it is an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from lit_compress.stages.lora import Retraining
from lit_compress.utils.errors import UserError

# arguments of the Trainer that a stage has of its own, or that nothing reads -> what to do
_SET_BY_STAGE = {
    "max_epochs": "would hold for every stage; set model.<stage>.epochs",
    "min_epochs": "has no effect, a stage ends after its epochs; set model.<stage>.epochs",
    "min_steps": "has no effect, a stage ends after its epochs; set model.<stage>.epochs",
    "enable_checkpointing": "has no effect, a stage always keeps last.ckpt; set checkpoint_every",
    "num_sanity_val_steps": "has no effect, every stage scores the dev set before it trains; leave it out",
    "default_root_dir": "has no effect; set run_dir",
    "use_distributed_sampler": "has no effect, batches are always dealt out; leave it out",
    "limit_test_batches": "has no effect, fit tests nothing; leave it out",
    "limit_predict_batches": "has no effect, fit predicts nothing; leave it out",
}
_TRAINING = tuple(field.name for field in fields(Retraining))  # the settings of a stage that are about its training

_SHARED = ("config", "print_config", "help", "seed_everything", "trust_remote_code", "trainer.accelerator")
_EVALUATION = (*_SHARED, "data", "model.teacher")
# command -> groups of options, or single ones, that it reads; others read all
_READ: dict[str, tuple[str, ...]] = {
    "factorize": (*_SHARED, "data", "model", "export", "trainer.precision"),
    "validate": _EVALUATION,
    "test": _EVALUATION,
    "predict": _EVALUATION,
    "bench": _EVALUATION,
    "export": _EVALUATION,
}
_ROWS_OF_TRAINING = ("data.batch_size", "data.train_examples", "data.hold_out")
# command -> options of these groups that it does not read
_UNREAD: dict[str, tuple[str, ...]] = {
    "factorize": ("model.backbone", "model.dense", "model.distillation", "model.recompute", "model.through"),
    "validate": _ROWS_OF_TRAINING,
    "test": (*_ROWS_OF_TRAINING, "data.validation_examples"),
    "predict": _ROWS_OF_TRAINING,
}


def names_of(words: Iterable[str]) -> list[str]:
    """Return the options among the words of a command line, by their names in a config.

    >>> names_of(["--device", "cpu", "--model.init_args.density=0.5", "-c", "a.yaml"])
    ['trainer.accelerator', 'model.density', 'config']
    """
    known = {"device": "trainer.accelerator", "c": "config", "h": "help"}
    names = (w.lstrip("-").partition("=")[0] for w in words if w.startswith("-") and not w[1:2].isdigit())
    return [known.get(name, name).replace(".init_args.", ".") for name in names]


def is_read(command: str, option: str) -> bool:
    """Return whether a command reads an option, which is named as in a config."""
    if (groups := _READ.get(command)) is None:
        return option.removeprefix("trainer.") not in _SET_BY_STAGE or not option.startswith("trainer.")

    def inside(names: Collection[str]) -> bool:
        return any(f"{option}.".startswith(f"{name}.") for name in names)

    trains = option.startswith("model.") and option.split(".")[2:3] and option.split(".")[2] in _TRAINING
    return inside(groups) and not (inside(_UNREAD.get(command, ())) or trains)


def check_read(command: str, options: Iterable[str], config: Any) -> None:
    """Refuse the first option that a command does not read.

    Args:
        command: its name.
        options: that were typed, as :func:`names_of` returns them.
        config: as parsed, also from files: a stage's own arguments of the Trainer are refused there too.

    Raises:
        UserError: see above.
    """
    if command not in _READ:
        for name, why in _SET_BY_STAGE.items():
            if (value := config.trainer[name]) is not None and value is not True:
                raise UserError(f"trainer.{name}: {value} {why}")
        return
    for option in options:
        if not is_read(command, option):
            use = "; nearest: eval_batch_size" if option == "data.batch_size" else "; leave it out"
            use += ", or use fit" if command == "factorize" else ""
            raise UserError(f"{option}: {command} does not read it{use}")
