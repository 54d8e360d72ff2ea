"""The base class of all methods: a LightningModule that runs one stage after another.

This is the only file that knows Lightning's order inside an optimizer step: closure (forward, backward) ->
``on_before_optimizer_step`` (gradients accumulated, reduced, unscaled, not clipped: scores are read here) -> clipping
(scores of after the step copy the gradients before it) -> step -> back in ``optimizer_step`` (weights are zeroed here).

The closure of a step goes through its micro-batches, see stages/micro_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_compress.evaluation.metrics import bind, build_metrics, higher_is_better
from lit_compress.models import backbones
from lit_compress.models.backbones import DEFAULT, finetuned_on
from lit_compress.models.budget import parse_budget
from lit_compress.models.outline import LayerShape
from lit_compress.models.sites import Model, blocks
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import describe
from lit_compress.stages.base import Stage, Training, build_optimizer, build_schedule, count_steps
from lit_compress.stages.compression import CompressedStage, Compression
from lit_compress.stages.distillation import Distillation
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.rank_rule import Allocation, RankRule
from lit_compress.stages.recompute import recompute, recomputes
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task, get_task
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import Fields
from lit_compress.utils.memory import freed_memory_returned, trim
from lit_compress.utils.sharding import send_from_first, several
from lit_compress.version import __version__


class Method(MicroBatches, Fields):
    """A compression method: a model, a task and a list of stages.

    A method declares its own options as a dataclass does (utils/fields.py): an annotated attribute with a value is an
    option, a value without an annotation a new default of one of these. ``__post_init__`` ends the constructor.

    Args:
        task: the task or its name; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model; NAME@REVISION is a branch, a tag or a commit of it,
            without it main. A run keeps the commit.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
        budget: of the export, in place of a density: size=20MB, params=5M, flops=0.3, speedup=3x (or
            speedup=3x@openvino-int8,32x128: in this runtime, for 32 texts of 128 tokens) or density=0.25.
        round_to: ranks and numbers of neurons and dimensions become multiples of it, within the same density; a rank
            below it stays.
        shape: ``uniform``: every layer keeps as many heads and as many neurons, so that the export is an ordinary model
            of its family; ``free``: as the method chooses.
        teacher: folder or hub name of a model fine-tuned on the task already, e.g. ``runs/x/dense/net``, in place of
            the dense stage.
        dense: fine-tuning of the backbone; its result is the teacher of the later stages.
        distillation: weights of the loss terms that compare the model with its teacher in the later stages.
        recompute: blocks compute their activations again in the backward, for less memory and a third more time.
            Stages whose forwards draw random numbers of their own keep them.

    Attributes:
        stores_zeros: True if the exported file keeps removed weights as zeros, which only the density counts.
        rule: for the ranks of the last stage; None: the method has no rule for ranks.
        usual_density: density where neither it nor a rank nor a budget is given; None: the method has another rule.
    """

    net: Model  # from configure_model() to release()
    stage: Stage  # from prepare() to release()
    stores_zeros = False
    rule: RankRule | None = None
    usual_density: float | None = 0.25

    def __init__(
        self,
        *,
        task: str | Task = "sst2",
        backbone: str = DEFAULT,
        density: float | None = None,
        budget: str | None = None,
        round_to: int | None = None,
        shape: LayerShape = "free",
        teacher: str | None = None,
        dense: Training = Training(),
        distillation: Distillation = Distillation(),
        recompute: bool = False,
        **own: Any,
    ) -> None:
        super().__init__()
        for name, value in own.items():
            setattr(self, name, value)
        density = (self.usual_density or 1.0) if density is None else density
        if not 0 < density <= 1:
            near = min(max(density, 0.01), 1.0)
            raise UserError(f"model.density: {density} is not in (0, 1]; nearest valid value {near}")
        self.task, self.kind = get_task(task), task_type(get_task(task))
        self.backbone, self.density = backbone, density
        self.teacher, self.recompute = teacher, recompute
        self.dense, self.distillation, self.round_to, self.shape = dense, distillation, round_to, shape
        self.budget = parse_budget(budget, type(self).__name__ if self.stores_zeros else None)
        self._teacher: tuple[Model, ...] = ()  # a tuple hides it from state dict, optimizer and DDP
        self.val_metrics: Any = nn.ModuleList([build_metrics(self.task) for _ in self.task.validation])
        self.dev_loss = MeanMetric()
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the options, and compute what follows from them."""

    def rank_rule(self, allocation: Allocation = "uniform", **usual: float) -> RankRule:
        """Return the rule for the ranks by the density, rank or ratio that was given, and set the density to its own.

        ``usual`` is the rank or ratio where none of the three was given; without it the usual density.

        Raises:
            UserError: several were given.
        """
        sizes = ("density", "rank", "rank_ratio")
        given = {name: value for name in sizes if (value := self.given.get(name)) is not None}
        if len(given) > 1:
            told = ", ".join(f"model.{name} {value}" for name, value in given.items())
            raise UserError(f"{told}: only one of them can decide the size; set the others to null")
        rule = RankRule(
            **given or usual or {"density": self.density}, allocation=allocation, fill=self.budget is not None,
            round_to=1 if self.round_to is None else self.round_to, uniform=self.shape == "uniform",
        )  # fmt: skip
        self.density = rule.density
        return rule

    def stages(self) -> list[Stage]:
        """Return new stages in order: ``dense``, unless a teacher is given, and the method's own; some only train."""
        dense = [] if self.teacher else [Stage("dense", self.dense, distil=False)]
        return [*dense, *(stage.or_plain() for stage in self.own_stages())]

    def own_stages(self) -> list[Stage]:
        """Return new stages in order, without the dense one."""
        raise NotImplementedError

    # ---------------------------------------------------------------- set-up

    def prepare(
        self, stage: Stage, seed: int, previous: Path | None, teacher: Callable[[], Model] | None = None,
        mark: Mapping[str, Any] = MappingProxyType({}), load: Callable[[Path], Model] = load_net,
    ) -> None:  # fmt: skip
        """Prepare for the fit of ``stage``; the model itself is built in ``configure_model``.

        ``previous`` is the folder of the model to start from, None for the backbone. ``teacher`` returns the dense
        model; None: the stage learns from the task alone. ``mark`` is of the checkpoint that will be loaded, from
        :meth:`on_save_checkpoint`. ``load`` returns the model of ``previous``.
        """
        self.stage, self._seed, self._previous, self._load = stage, seed, previous, load
        self._load_teacher, self._structure = teacher, mark.get("structure")
        self.untrained, self.skips = -inf, False  # skips: this optimizer step; its gradients are gone, as not finite
        self.initial, stage.notes = mark.get("initial", {}), mark.get("notes", {})

    def configure_model(self) -> None:
        """Build the model before a strategy wraps it; shard it (FSDP2) when the strategy has a device mesh."""
        if getattr(self, "net", None) is not None:
            return
        if self._previous is None:
            torch.manual_seed(self._seed)  # its new head is the same on any number of processes and after a resume
        with torch.device("cpu"), freed_memory_returned():
            previous = self.stage.previous = self._previous
            net = self._load(previous) if previous else backbones.load_net(self.backbone, self.task)
            net = self.stage.begin(net, self, self._structure)
            if self._load_teacher and self.stage.distil and self.distillation.on:
                self._teacher = (self._load_teacher().requires_grad_(False).eval(),)
        trim()  # what a calibration has left free is not used by the training
        if self._structure is None and several():
            send_from_first(net, self.trainer.strategy.root_device)
        net.train(self.stage.drops_out)
        self.kind.freeze(net)
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            mesh = self.device_mesh["data_parallel"]
            for *_, block in blocks(net):
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
            if hasattr(net, "generate"):  # it calls the encoder directly, without the model's forward
                register_fsdp_forward_method(net, "generate")
            vars(net)["_is_fsdp_managed_module"] = True  # generate() continues on every rank until all have finished
        self.net = net
        for stage in self.stage.together:
            stage.attach(net)
        # Scores and frozen matrices are the same on every rank already; DDP need not send them each step.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def on_fit_start(self) -> None:
        """Move the teacher to the device; let blocks recompute their activations, if the user asks for it."""
        for teacher in self._teacher:
            move(teacher, self.device)
        if recomputes(self.stage, self.net, self.recompute):
            recompute(self.net)

    def release(self) -> None:
        """Release the model, its teacher and the stage after a fit."""
        for teacher in self._teacher:
            move(teacher, "cpu")
        del self.net, self.stage, self._load_teacher
        self._teacher, self.trainer = (), None

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the stage's optimizer, and its schedule, which depends on the optimizer step only."""
        trainer = self.trainer
        steps = trainer.datamodule.steps_per_epoch()  # type: ignore[attr-defined]
        self.stage.set_total_steps(
            count_steps(steps, self.stage.settings.epochs, trainer.limit_train_batches, trainer.max_steps)
        )
        optimizer = build_optimizer(self.stage, self.net, trainer.precision)
        return {"optimizer": optimizer, "lr_scheduler": build_schedule(self.stage, optimizer)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add method, stage, structure and metrics, as primitives: ``weights_only=True`` loads the checkpoint."""
        checkpoint["lit_compress"] = {
            "version": __version__,
            "method": type(self).__name__,
            "stage": self.stage.name,
            "total_steps": self.stage.total_steps,
            "data": self.trainer.datamodule.fingerprint(),  # type: ignore[attr-defined]
            "split": self.trainer.datamodule.split,  # type: ignore[attr-defined]
            "at_budget": self.stage.at_budget(self.trainer.global_step),
            "structure": describe(self.net),
            "initial": self.initial,
            "notes": self.stage.notes,
            "threads": torch.get_num_threads(),
            "metrics": {
                name: float(value)
                for name, value in self.trainer.callback_metrics.items()
                if name.startswith("val") and name not in ("val/score", "val/loss")
            }
            or self.initial,  # of a stage of no epochs
        }

    # ---------------------------------------------------------------- around the optimizer step

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the stage read the gradients, which are accumulated, reduced, unscaled and not yet clipped."""
        if not self.skips:
            for stage in self.stage.together:
                stage.before_step(self.net)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip all gradients by one norm, except in parameter groups with ``clip`` False."""
        if gradient_clip_val:
            for stage in self.stage.together:
                stage.before_clipping(self.net)
        groups = optimizer.param_groups
        optimizer.param_groups = [group for group in groups if group.get("clip", True)]
        try:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        finally:
            optimizer.param_groups = groups

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the optimizer step, then let the stage change weights; Lightning counts the step only afterwards."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        step, every = self.trainer.global_step + 1, getattr(self.trainer, "log_every_n_steps", 1)
        for stage in self.stage.together:
            stage.after_step(self.net, step)
        if (every and step % every == 0) or step == self.stage.total_steps:
            for name, value in self.stage.status(self.net, step).items():
                self.log(f"train/{name}", value)
            self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    # ---------------------------------------------------------------- evaluation

    def on_validation_epoch_start(self) -> None:
        """Give the rows to metrics that need them; let the stage prepare the model, e.g. fix its gates."""
        for metrics, loader in zip(self.val_metrics, self.trainer.val_dataloaders, strict=False):  # type: ignore[arg-type]
            bind(metrics, loader.dataset.rows)
        self.stage.before_validation(self.net, self.trainer.global_step)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Update the dev metrics of one validation split, and the loss on the first."""
        outputs = self.kind.outputs(self.net, batch, self.trainer.datamodule.tokenizer)  # type: ignore[attr-defined]
        real = batch["index"] >= 0  # the others only fill up the last batches of a rank
        outputs, batch = outputs[real], {name: column[real] for name, column in batch.items()}
        self.kind.observe(self.val_metrics[dataloader_idx], outputs, batch)
        if not dataloader_idx and (loss := self.kind.dev_loss(outputs, batch)) is not None:
            counted = self.kind.counted(batch)
            count = len(outputs) if counted is None else int(counted.sum())
            self.dev_loss.update(loss if count else 0.0, count)  # on every rank, also without real rows

    def on_validation_epoch_end(self) -> None:
        """Log the dev metrics, and ``val/score``, by which the best epoch is chosen.

        The score is the first metric (negated where less is better), or -inf while the model is above its budget. The
        metrics before the first step are kept in ``initial``, the score in ``untrained``: -inf too for a new head.
        """
        values: dict[str, Tensor] = {}
        for i, metrics in enumerate(self.val_metrics):
            if any(m._update_called for m in metrics.values()):
                prefix = "val" if i == 0 else self.task.validation[i].replace("validation", "val")
                values |= {f"{prefix}/{name}": value for name, value in metrics.compute().items()}
                metrics.reset()
        loss = self.dev_loss.compute() if self.dev_loss._update_called else None
        self.dev_loss.reset()
        main = float(values[f"val/{self.task.metrics[0]}"])
        score = main if higher_is_better(self.task) else -main
        at_budget = not hasattr(self, "stage") or self.stage.at_budget(self.trainer.global_step)
        if self.trainer.sanity_checking:
            self.initial = {name: float(value) for name, value in values.items()}
            learned = self._previous is not None or finetuned_on(self.backbone, self.task)
            self.untrained = score if at_budget and learned else -inf
            return
        self.log_dict(values, prog_bar=True)
        self.log("val/score", score if at_budget else -inf, logger=False)  # a metric again
        if loss is not None:
            self.log("val/loss", loss)


class Ranked(Method):
    """A method whose last stage has factors.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]. Give one of density,
            rank and rank_ratio.
        rank: the same rank for every matrix.
        rank_ratio: the same fraction of its ranks for every matrix, floor(ratio * min(out, in)).
        allocation: ``uniform`` applies the same rule to every matrix; ``global`` keeps the same number of parameters in
            all, where the squared singular values of the (weighted) matrices per parameter are largest.
        retrain: training of the factors, and the weighting of the factorization, if there is one.
    """

    rule: RankRule
    rank: int | None = None
    rank_ratio: float | None = None
    allocation: Allocation = "uniform"


class Untaught(Method):
    """A method that does not distil by default, as in its paper."""

    distillation = Distillation(alpha=0.0)


class OneShot(Method, Compression):
    """A method that compresses in one shot, and may train afterwards.

    Args:
        prune: the training afterwards.
    """

    prune: Training = Training()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [CompressedStage("prune", self.prune, self)]
