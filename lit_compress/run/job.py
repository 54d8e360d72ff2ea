"""A job: method, data, the Trainer's arguments and the form of the export, parsed once for a command."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from lit_compress.data.datamodule import DataModule
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.folder import read_task
from lit_compress.export.report import reading_length
from lit_compress.methods.base import Method
from lit_compress.models.accounting import dense_sites
from lit_compress.models.backbones import empty_net, load_config, resolve
from lit_compress.models.checks import refuse_compressed
from lit_compress.models.files import check_form
from lit_compress.models.sites import Model
from lit_compress.models.surgery import without_values


@dataclass
class Job:
    """The parsed parts of a command.

    Attributes:
        trainer: the Trainer's arguments.
        choices: for the export.
        every: optimizer steps between two checkpoints.
        tokens: that ``vocabulary data`` leaves; None: all, or it is not known yet.
    """

    method: Method
    data: DataModule
    trainer: dict[str, Any]
    seed: int
    choices: Choices = AS_IS
    every: int = 500
    tokens: int | None = None

    def __post_init__(self) -> None:
        self.data.accumulate = self.trainer.get("accumulate_grad_batches") or 1

    def at(self, density: float | None = None, **changes: Any) -> Self:
        """Return this job with a new method, at another density, or with other fields."""
        other, given = copy.copy(self), dict(self.method.given)
        if density is not None:
            given["density"] = density
        vars(other).update(changes, method=type(self.method)(**given))
        return other

    @cached_property
    def dense(self) -> Model:
        """The backbone without values, which nobody changes; one that is compressed already is refused."""
        method, what = self.method, f"model.backbone: '{self.method.backbone}'"
        refuse_compressed(what, Path(method.backbone).expanduser())
        check_form(what, Path(resolve(method.backbone)), whole=True)
        config = load_config(method.backbone, method.task)
        net = without_values(lambda: empty_net(config))
        dense_sites(net, net)  # all models of its sizes are counted by it
        return net

    @property
    def length(self) -> int:
        """Tokens of a text at which models are measured."""
        return reading_length(self.dense, read_task(self.data))
