"""The base class of stages: one ``Trainer.fit`` of a method, and the hooks that are called in it.

The set of parameters never changes inside a stage; values may (masks, p, temperature). The state of a stage is in
buffers, so that checkpoints contain it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch import Tensor, nn

from lit_compress.data.datamodule import DataModule
from lit_compress.models.sites import Model
from lit_compress.models.surgery import Structure
from lit_compress.numerics.losses import States, layer_distillation_loss
from lit_compress.numerics.schedules import linear_warmup_decay
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.sharding import Shards, sum_over_ranks

Limits = dict[str, dict[str, Any]]  # option -> arguments of ``require``, of a class and those derived from it


@dataclass(frozen=True)
class Training:
    """How long and how fast a stage trains.

    Args:
        epochs: passes over the training data.
        learning_rate: peak learning rate of AdamW.
        warmup: fraction of the optimizer steps in which the learning rate rises; then it falls linearly to 0.
        weight_decay: decoupled weight decay of matrices; biases and LayerNorms have none.
        optimizer: in place of AdamW, a class such as torch.optim.SGD; options behind its name are the class's, e.g.
            optimizer.lr and optimizer.weight_decay, which replace learning_rate and weight_decay.
        lr_scheduler: in place of warm-up and linear decay, a class such as torch.optim.lr_scheduler.ExponentialLR, with
            its options behind its name; it counts optimizer steps.
    """

    epochs: int = 3
    learning_rate: float = 2e-5
    warmup: float = 0.06
    weight_decay: float = 0.0
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    limits: ClassVar[Limits] = {
        "epochs": {"low": 0}, "learning_rate": {"above": 0, "hint": "e.g. 2e-5"}, "warmup": {"low": 0, "high": 1},
        "weight_decay": {"low": 0},
    }  # fmt: skip

    def __post_init__(self) -> None:
        for kind in reversed(type(self).__mro__):
            for option, bounds in vars(kind).get("limits", {}).items():
                require(self, option, **bounds)
        if self.optimizer is not None or self.lr_scheduler is not None:
            self.tried()

    def tried(self, steps: int = 0) -> torch.optim.Optimizer:
        """Return the optimizer for two small parameters, after a step with its schedule: classes check options so.

        Raises:
            UserError: a class refuses its options, or cannot train a stage of so many ``steps``.
        """
        option, parameters = "optimizer", [nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = (self.optimizer or torch.optim.AdamW)([{"params": [parameter]} for parameter in parameters])
            option = "lr_scheduler"
            schedule: Any = None if self.lr_scheduler is None else self.lr_scheduler(optimizer)
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise UserError(
                    "lr_scheduler: ReduceLROnPlateau waits for a metric, and schedules here count steps; nearest: "
                    "torch.optim.lr_scheduler.ExponentialLR"
                )
            option = "optimizer"
            optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
            option = "lr_scheduler"
            if schedule is not None:
                schedule.step()
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise UserError(f"{option}: {error}") from error
        if (most := getattr(schedule, "total_steps", steps)) < steps:
            raise UserError(
                f"lr_scheduler.total_steps: {most} is below the {steps} steps of the stage; nearest valid {steps}"
            )
        return optimizer


class Stage(nn.Module):
    """One fit. This base class trains the model of the stage before (or the backbone) on the task loss.

    Args:
        name: folder of the stage in the run, and its name in logs.
        distil: True to add the distillation terms to the loss if there is a teacher.

    Attributes:
        previous: folder of the model that the stage starts from, once it begins; None for the backbone.
        from_backbone: True to start from the pre-trained backbone instead of the model of the stage before.
        decided_by_data: True if training or calibration decides which shapes the stage leaves.
        shrinks_first: True if the model has the shapes that :meth:`outline` returns while it trains.
        repeatable: True if a block that runs again in the backward gives the same outputs.
        matches: True if :meth:`layer_loss` chooses by distances over a whole step which hidden states it compares.
        forwards: how often a batch goes through the model in a step.
        drops_out: False if dropout is off while the stage trains.
        total_steps: optimizer steps of the stage; 0 until :meth:`set_total_steps`.
        density: fraction of the sites' weights that is to be left; None: it follows from a rule, or nothing is removed.
        round_to: ranks and numbers of units are multiples of it; None: the stage chooses none.
        uniform: True if the stage can leave all layers the same numbers of heads and of neurons.
        rate_option: the option that sets the learning rate.
        over_step: function that replaces values of a micro-batch, in place, by their sum over the optimizer step.
        notes: facts found by :meth:`begin`, as JSON, for the record of the stage; checkpoints have it.
    """

    previous: Path | None = None
    decided_by_data = False
    shrinks_first = repeatable = False
    matches = False
    forwards = 1
    drops_out = True
    density: float | None = None
    round_to: int | None = None
    uniform = False

    def __init__(self, name: str, training: Training, distil: bool = True) -> None:
        super().__init__()
        self.name = name
        self.settings = training
        self.distil = distil
        self.rate_option = f"{name}.learning_rate"
        self.total_steps = 0
        self.from_backbone: bool = getattr(training, "init", None) == "pretrained"
        self.over_step: Callable[[Tensor], None] = sum_over_ranks
        self.notes: dict[str, Any] = {}
        self.repeatable = self.repeatable or type(self) is Stage  # which adds nothing to a step

    @property
    def together(self) -> tuple[Stage, ...]:
        """This stage and others in the same fit: ``attach`` and the hooks of a step are called on each, in order."""
        return (self,)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.density == 1

    def plain(self) -> Stage:
        """Return the stage that only trains, in the place of this one."""
        return Stage(self.name, self.settings, self.distil)

    def or_plain(self) -> Stage:
        """Return this stage, or where nothing is to be removed one that only trains, from the same model."""
        if not self.keeps_all:
            return self
        plain = self.plain()
        plain.density, plain.round_to, plain.uniform = 1.0, self.round_to, self.uniform
        return plain

    def check(self, net: Model) -> None:
        """Refuse by a UserError settings that cannot work for the backbone, which has no values (device ``meta``)."""

    def outline(self, net: Model) -> Model:
        """Return ``net`` in the form that this stage leaves it in, for the sizes of the export before any training.

        Where data decide on ranks, rows and widths, these are spread evenly. ``net`` is of the stage before, without
        values (device ``meta``), and may be changed in place.
        """
        return net

    def check_data(self, net: Model, data: DataModule) -> None:
        """Refuse by a UserError settings that need more training examples than there are."""

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Return ``net``, of the stage before or the backbone, in its form for training; it may be changed in place.

        With a ``structure``, of the model in a checkpoint that will be loaded, values of new parts come from there;
        where data decide, it has the shapes.
        """
        return net

    def attach(self, net: Model) -> None:
        """Make buffers shaped like parameters of ``net``; called after sharding, before any checkpoint is loaded."""

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Return the parameter groups with settings of their own: ``params``, ``lr``, ``weight_decay`` ...

        The schedule scales every group's learning rate, except with ``constant`` True; all gradients are clipped by one
        norm, except with ``clip`` False.
        """
        return []

    def set_total_steps(self, total_steps: int) -> None:
        """Set the number of optimizer steps, and what follows from it; a UserError if a schedule needs more steps."""
        self.total_steps = total_steps
        if self.settings.lr_scheduler is not None:
            self.settings.tried(total_steps)

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss terms by name, whose sum is minimised; each is logged as ``train/<name>``."""
        return method.objective(method.logits(batch), batch, distil=self.distil)

    def layer_loss(self, student: States, teacher: States, mask: Tensor | None, relative: bool | States) -> Tensor:
        """Return the distance between hidden states of student and teacher in one forward, embeddings first.

        ``relative`` has the variances of the teacher's states in the whole step, or says whether to take the batch's.
        """
        return layer_distillation_loss(student, teacher, mask, relative)

    def before_step(self, net: Model) -> None:
        """Read the gradients of one optimizer step: accumulated, reduced, unscaled, not clipped.

        The stage's own parameters are never sharded; here their gradients are averaged over the ranks of FSDP2.
        """
        shards = Shards(next(net.parameters()))
        if (reduce := shards.reduce) is not None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                reduce(parameter.grad)
                parameter.grad /= shards.place[1]

    def before_clipping(self, net: Model) -> None:
        """Copy gradients that :meth:`after_step` needs unclipped; called only where gradients are clipped."""

    def after_step(self, net: Model, step: int) -> None:
        """Change values, e.g. zero weights, after the optimizer step; ``step`` counts the completed ones."""

    def before_validation(self, net: Model, step: int) -> None:
        """Prepare ``net`` for evaluation, e.g. fix its gates; ``step`` counts the completed optimizer steps."""

    def keep_untrained(self, net: Model) -> None:
        """Give the validated model before training the values in which it is kept if no epoch is better."""

    def status(self, net: Model, step: int) -> dict[str, float]:
        """Return values to log at ``step``, by name, e.g. target and achieved density."""
        return {}

    def at_budget(self, step: int) -> bool:
        """Return whether the model has its final density; only then an epoch may count as the best."""
        return True

    def deploy(self, net: Model) -> None:
        """Replace the stage's own layers in the trained ``net``, in place, by layers that have ``fuse()``.

        The outputs in evaluation mode stay those that were validated.
        """

    def finish(self, net: Model, folder: Path) -> None:
        """Write files for the next stage next to the best model; called on rank 0, after :meth:`deploy`."""


def require_steps(option: str, value: float) -> None:
    """Refuse by a UserError a ``value`` that is neither a fraction of the optimizer steps nor a number of them."""
    if not 0 <= value < inf or (value >= 1 and value != int(value)):
        near = max(0, round(value)) if isfinite(value) else 0.1
        raise UserError(
            f"{option}: {value} is neither a fraction of the steps nor a number of them; nearest valid {near}"
        )


def count_steps(steps: int, epochs: int, limit: int | float | None = None, max_steps: int | None = None) -> int:
    """Return the number of optimizer steps of a fit; Lightning's own count breaks exact resume.

    ``steps`` are of an epoch of all training data. ``limit`` is the Trainer's ``limit_train_batches``: a number of
    steps, or a fraction (float of at most 1). ``max_steps`` is None or -1 for no limit.
    """
    if isinstance(limit, float) and limit <= 1:
        steps = int(steps * limit)
    elif limit is not None:
        steps = min(steps, int(limit))
    return min(steps * epochs, max_steps) if max_steps and max_steps > 0 else steps * epochs


def build_optimizer(stage: Stage, net: Model, precision: str) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters: the stage's own groups, and matrices apart from the rest.

    ``net`` is already sharded. The stage's settings hold for all parameters that are not in :meth:`Stage.param_groups`;
    ``precision`` is the Trainer's, e.g. ``bf16-mixed``.
    """
    settings = stage.settings
    own = stage.param_groups(net)
    named = {id(parameter) for group in own for parameter in group["params"]}
    decay, plain = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for parameter in net.parameters():
        if parameter.requires_grad and id(parameter) not in named:
            (decay if parameter.ndim > 1 else plain).append(parameter)
    rest: dict[str, Any] = {"params": plain, "weight_decay": 0.0}
    if settings.optimizer is None:
        optimizer: Any = torch.optim.AdamW(
            [{"params": decay, "weight_decay": settings.weight_decay}, rest, *own],
            lr=settings.learning_rate,
            # A fused optimizer unscales float16 gradients itself, so that scores would be read scaled.
            fused=None if precision == "16-mixed" else True,
        )
    else:
        optimizer = settings.optimizer([{"params": decay}, rest, *own])
    if precision == "bf16-mixed":
        optimizer._step_supports_amp_scaling = False  # nothing is scaled: Lightning may clip
    return optimizer


def build_schedule(stage: Stage, optimizer: torch.optim.Optimizer) -> LRSchedulerConfigType:
    """Return linear warm-up and decay of the learning rates, or the schedule of the settings, as Lightning takes it.

    It counts steps. In the linear one, groups with ``constant`` True keep their rate.
    """
    if stage.settings.lr_scheduler is not None:
        return {"scheduler": stage.settings.lr_scheduler(optimizer), "interval": "step"}
    total, warmup = stage.total_steps, ceil(stage.settings.warmup * stage.total_steps)

    def scheduled(step: int) -> float:
        return linear_warmup_decay(step, total, warmup)

    factors = [(lambda step: 1.0) if group.get("constant") else scheduled for group in optimizer.param_groups]
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors), "interval": "step"}
