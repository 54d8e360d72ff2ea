"""A stage: one ``Trainer.fit`` of a method, and everything that happens in it.

The parameter set never changes inside a stage; values may (masks, p, temperature). What a stage must
remember is a buffer of it, so that it travels in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from lit_compress import backbones
from lit_compress.errors import UserError
from lit_compress.losses import layer_distillation_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.kinds.base import TaskKind
    from lit_compress.methods.distillation import Distillation
    from lit_compress.surgery import Structure
    from lit_compress.tasks import Task


@dataclass(frozen=True)
class Training:
    """How long and how fast a stage trains.

    Args:
        epochs: passes over the training data.
        learning_rate: peak learning rate of AdamW.
        warmup: fraction of the optimizer steps in which the learning rate rises; then it falls linearly to 0.
        weight_decay: decoupled weight decay of matrices; biases and LayerNorms have none.
    """

    epochs: int = 3
    learning_rate: float = 2e-5
    warmup: float = 0.06
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"epochs: {self.epochs} is below 1, the smallest valid value")
        if self.learning_rate <= 0:
            raise UserError(f"learning_rate: {self.learning_rate} is not above 0; e.g. 2e-5")
        if not 0 <= self.warmup <= 1:
            raise UserError(f"warmup: {self.warmup} is not in [0, 1]; nearest valid {min(max(self.warmup, 0), 1)}")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay: {self.weight_decay} is below 0, the smallest valid value")


class Host(Protocol):
    """What a stage sees of the method it belongs to."""

    backbone: str
    task_record: Task
    micro_seed: int  # of this forward; the same on every rank
    trainer: Any
    kind: TaskKind
    distillation: Distillation

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the net's logits [b, ..., classes] for ``batch``."""

    def objective(self, logits: Tensor, batch: dict[str, Tensor], distil: bool, copies: int = 1) -> dict[str, Tensor]:
        """Return the task term and, with a teacher, the distillation terms."""


class Stage(nn.Module):
    """One fit. The base trains the net of the previous stage (or the backbone) on the task loss.

    Args:
        name: folder of the stage in the run, and its name in logs.
        training: how it trains.
        distil: whether the teacher is part of the loss.
    """

    from_backbone = False  # start from the pre-trained backbone instead of the net of the stage before

    def __init__(self, name: str, training: Training, distil: bool = True) -> None:
        super().__init__()
        self.name = name
        self.training_settings = training
        self.distil = distil
        self.total_steps = 0

    def check(self, net: PreTrainedModel) -> None:
        """Refuse what cannot work before anything is trained.

        Args:
            net: the backbone, without values (device ``meta``).

        Raises:
            UserError: e.g. a rank that saves nothing.
        """

    def check_data(self, examples: int) -> None:
        """Refuse to look at more than the training ``examples`` there are, also before anything is trained.

        Raises:
            UserError: fewer must be asked for.
        """

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Return the net this stage trains.

        Args:
            method: whose stage it is.
            previous: folder of the net to start from; None for the backbone itself.
            structure: of the checkpoint that the values are about to come from; None when the stage starts.
        """
        from lit_compress.surgery import load_net

        return load_net(previous) if previous else backbones.load_net(method.backbone, method.task_record)

    def attach(self, net: PreTrainedModel) -> None:
        """Make the state that mirrors parameters of ``net`` (after sharding, before any checkpoint is read)."""

    def own_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """Return AdamW's groups for parameters with settings of their own: ``params``, ``lr``, ``weight_decay`` ...

        All others are trained as the stage's settings say. The schedule scales every group's learning rate, except
        with ``constant``: True; gradients are clipped together, except with ``clip``: False.
        """
        return []

    def begin(self, total_steps: int) -> None:
        """Learn the length of the stage in optimizer steps.

        Raises:
            UserError: a schedule does not fit into it.
        """
        self.total_steps = total_steps

    def losses(self, method: Host, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms of the loss, whose sum is minimised; the names are logged as ``train/<name>``."""
        return method.objective(method.logits(batch), batch, distil=self.distil)

    def layer_loss(self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the distance of the hidden states of one forward from the teacher's; embeddings stand first."""
        return layer_distillation_loss(student, teacher, mask)

    def before_step(self, net: PreTrainedModel) -> None:
        """See the gradients of one optimizer step: accumulated, reduced, unscaled, not clipped."""

    def after_step(self, net: PreTrainedModel, step: int) -> None:
        """Change values after the optimizer step; ``step`` counts the completed ones."""

    def before_validation(self, net: PreTrainedModel, step: int) -> None:
        """Bring ``net`` into the form that is evaluated; ``step`` counts the completed optimizer steps."""

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Return what to show of the stage at ``step``, e.g. target and achieved density."""
        return {}

    def at_budget(self, step: int) -> bool:
        """Say whether the net has its final density; only then an epoch may count as the best."""
        return True

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Write what the next stage needs beside the net (rank 0, after the best checkpoint was loaded)."""


def count_steps(
    batches: int, epochs: int, accumulate: int = 1, limit: int | float | None = None, max_steps: int | None = None
) -> int:
    """Return the optimizer steps of a fit, without asking Lightning (its count breaks exact resume).

    Args:
        batches: per epoch and rank.
        epochs: of the stage.
        accumulate: batches per optimizer step; the last step of an epoch may have fewer.
        limit: Trainer's ``limit_train_batches``.
        max_steps: Trainer's; None or -1 for no limit.
    """
    if isinstance(limit, float):
        batches = int(batches * limit)
    elif limit is not None:
        batches = min(batches, limit)
    steps = ceil(batches / accumulate) * epochs
    return min(steps, max_steps) if max_steps and max_steps > 0 else steps
