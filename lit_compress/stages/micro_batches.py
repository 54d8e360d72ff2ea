"""The closure of an optimizer step: forward and backward of its micro-batches.

Lightning's batch is a process's share of the rows of an optimizer step. ``training_step`` divides it into micro-batches
and does the backward of all but the last one itself; a strategy reduces the gradients in the last one. A mean over n of
the N samples, tokens or rows that the whole step has, on P processes, is weighted by

    n P / N        since the strategy divides by P: the gradient is the mean's over N

so any split of the same rows makes the same step. Two numbers of the whole step are needed before its first
backward. For the variances of a relative distance of hidden states, the teacher reads all micro-batches first. For the
distances by which layers are matched, the model does so too. One process without accumulation needs neither.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_compress.models.sites import Model
from lit_compress.numerics.losses import logits_losses, state_moments
from lit_compress.stages.distillation import Distillation
from lit_compress.tasks.base import TaskType
from lit_compress.tasks.records import Task
from lit_compress.utils.sharding import several, sum_over_ranks

Batch = dict[str, Tensor]
_MEANS = ("task", "distillation", "layers", "consistency")  # terms of Method.objective; others are of the model alone


def hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """Return the hidden states in a model's ``output``, for each stack (encoder, decoder): embeddings, then blocks."""
    if "encoder_hidden_states" in output:
        return [output.encoder_hidden_states, output.decoder_hidden_states]
    return [output.hidden_states]


class StepSums:
    """Sums of values over a step's micro-batches and processes, for ``Stage.over_step``.

    Without ``several`` micro-batches, values are summed over processes at once.

    Attributes:
        known: whether the sums are complete; until then values are added.
        real: 0-dim bool, whether the rows of this micro-batch count.
        place: number of the next values in this micro-batch.
    """

    def __init__(self, several: bool) -> None:
        self.several, self.known, self.place = several, False, 0
        self.real: Tensor | None = None
        self._sums: list[Tensor] = []

    def __call__(self, values: Tensor) -> None:
        """Replace ``values`` by their sum, in place, if it is known."""
        assert self.real is not None
        if self.known:
            values.copy_(self._sums[self.place])
        else:
            values.mul_(self.real)
            if not self.several:
                sum_over_ranks(values)
            elif self.place < len(self._sums):
                self._sums[self.place] += values
            else:
                self._sums.append(values.clone())
        self.place += 1

    def finish(self) -> None:
        """Complete the sums."""
        for values in self._sums:
            sum_over_ranks(values)
        self.known = True


class MicroBatches(pl.LightningModule):
    """The part of a method that computes the gradients of an optimizer step; stages use its public attributes.

    Attributes:
        step_seed: of this optimizer step; the same on every rank and for every micro-batch.
        own_seed: of this micro-batch, from which dropout is drawn.
    """

    net: Model
    stage: Any  # a Stage, which knows this class
    backbone: str
    task: Task
    kind: TaskType
    distillation: Distillation
    _seed: int
    _teacher: tuple[Model, ...]

    def __init__(self) -> None:
        super().__init__()
        self.step_seed = self.own_seed = 0
        self._hidden: list[list[tuple[Tensor, ...]]] | None = None  # of this micro-batch's forwards; None: off
        self._weights: Tensor | None = None  # of the means of this micro-batch, as TaskType.counts; None: all are 1
        self._variances: list[list[Tensor]] | None = None  # of the teacher's states in this step; None: of the batch
        self._taught: Any = None  # the teacher's output for this batch, if it is known already
        self._divided = False  # this step, into micro-batches

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the random numbers by seed, stage, epoch and step, so that a resumed run draws the same ones."""
        self.step_seed = crc32(f"{self._seed} {self.stage.name} {self.current_epoch} {batch_idx}".encode())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the loss of the last micro-batch; the gradients of the others are in the parameters then.

        Logs the sum of the stage's loss terms and each term, of the rows of the whole step.
        """
        columns = {name: column for name, column in batch.items() if name not in ("parts", "total")}
        number, total = batch.get("parts", 1), batch.get("total")
        parts = [
            dict(zip(columns, each, strict=True))
            for each in zip(*(column.tensor_split(number) for column in columns.values()), strict=True)
        ]
        self._divided, sums = number > 1, None
        if total is not None:
            self._variances = self._teacher_variances(parts)
            sums = self._step_sums(parts)
        seen: dict[str, Tensor] = {}
        loss = torch.zeros(())
        for i, part in enumerate(parts):
            if i:
                self._add_gradients(loss, first=i == 1)
            if total is not None:
                weights = self.kind.counts(part) / total * self.trainer.world_size
                self._weights = weights.where(_real(part), 0.0)
            terms = self._terms(part, i, sums)
            if self._divided:
                terms = {name: term if name in _MEANS else term / number for name, term in terms.items()}
            loss = torch.stack(list(terms.values())).sum()
            values = {"loss": loss, **terms}
            seen = {name: value.detach() + seen[name] if i else value.detach() for name, value in values.items()}
        self._weights = self._variances = self._taught = None
        if several():
            sum_over_ranks(means := torch.stack([*seen.values()]) / self.trainer.world_size)
            seen = dict(zip(seen, means, strict=True))
        self.log("train/loss", seen.pop("loss"))  # not for the bar, for which Lightning waits in every step
        self.log_dict({f"train/{name}": value for name, value in seen.items()})
        return loss

    def _terms(self, batch: Batch, part: int, sums: StepSums | None) -> dict[str, Tensor]:
        """Return the stage's loss terms of micro-batch number ``part``, which has random numbers of its own."""
        self.own_seed = self.step_seed + self.global_rank + (part * self.trainer.world_size if part else 0)
        torch.manual_seed(self.own_seed)
        if sums is not None:
            sums.real, sums.place = _real(batch), 0
        self._hidden = [] if self._listens else None
        terms = self.stage.losses(self, batch)
        self._hidden = None  # off in validation and in recomputation by checkpointing
        return terms

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the model's logits [b, ..., classes] for ``batch``; collect its hidden states for distillation."""
        output = self.kind.run(self.net, batch, output_hidden_states=self._hidden is not None)
        if self._hidden is not None:
            stacks = hidden_states(output)
            # transformers collects hidden states by the class of the block: a replaced block would be missing
            assert len(stacks[0]) == 1 + self.net.config.num_hidden_layers
            self._hidden.append(stacks)
        return self.kind.logits(output, batch)

    def objective(
        self, logits: Tensor, batch: dict[str, Tensor], distil: bool, copies: int = 1, consistency: float = 0.0
    ) -> dict[str, Tensor]:
        """Return the loss terms by name: the task's and, with a teacher, the distillation's.

        Args:
            logits: [copies * b, ..., classes], one copy of the batch after the other, made by :meth:`logits`.
            batch: the b examples.
            distil: add the distillation terms if there is a teacher.
            copies: number of forwards of the batch; the loss is the mean over them.
            consistency: weight of the distance between the logits of two copies; 0 leaves it out.
        """
        settings, kind, output = self.distillation, self.kind, None
        if distil and self._teacher:
            listens = self._hidden is not None
            with torch.no_grad():
                output = self._taught or kind.run(self._teacher[0], batch, output_hidden_states=listens)
        unread = output is not None and settings.alpha > 0 and not settings.label_weight
        losses = logits_losses(
            logits, None if unread else batch.get("labels"), kind.loss,
            teacher=kind.logits(output, batch) if output is not None and settings.alpha > 0 else None,
            temperature=settings.temperature, counted=kind.counted(batch), copies=copies, consistency=consistency > 0,
        )  # fmt: skip
        if self._weights is not None:
            losses = {name: self._weights[0] * loss for name, loss in losses.items()}
        last = {"consistency": consistency * losses.pop("consistency")} if consistency > 0 else {}
        if output is None:
            return losses | last
        terms = {"task": settings.label_weight * losses["task"]}
        if settings.alpha > 0:
            terms["distillation"] = settings.logits_weight(kind.loss) * losses["distillation"]
        if self._hidden is not None:
            terms["layers"] = self._layers_term(output, batch, copies)
        return terms | last

    def _layers_term(self, output: Any, batch: dict[str, Tensor], copies: int) -> Tensor:
        """Return the weighted distance of the hidden states of all forwards from the teacher's in its ``output``."""
        assert self._hidden is not None
        settings, distances = self.distillation, list[Tensor]()
        size = sum(len(stacks[0][0]) for stacks in self._hidden) // copies  # texts of the batch
        passes = [
            [[h[start : start + size] for h in states] for states in stacks]
            for stacks in self._hidden
            for start in range(0, len(stacks[0][0]), size)
        ]
        for stacks in passes:
            for i, states in enumerate(stacks):
                mask = self.kind.masks(batch)[i] if settings.mask_padding else None
                relative = settings.relative if self._variances is None else self._variances[i]
                distance = self.stage.layer_loss(states, hidden_states(output)[i], mask, relative)
                if self._weights is not None:
                    distance = self._weights[1 + i if settings.mask_padding else -1] * distance
                distances.append(distance)
        return settings.alpha_layers / len(passes) * torch.stack(distances).sum()

    @property
    def _listens(self) -> bool:
        """Whether hidden states are compared with the teacher's in this stage."""
        return bool(self._teacher) and self.stage.distil and self.distillation.alpha_layers > 0

    @torch.no_grad()
    def _teacher_variances(self, parts: list[Batch]) -> list[list[Tensor]] | None:
        """Return the variances of the teacher's hidden states in the whole step, per stack and layer, if needed."""
        settings = self.distillation
        if not (self._listens and settings.relative):
            return None
        sums: Any = 0.0
        for part in parts:
            output = self.kind.run(self._teacher[0], part, len(parts) == 1, output_hidden_states=True)
            stacks = hidden_states(output)
            masks = self.kind.masks(part) if settings.mask_padding else (None, None)
            moments = [state_moments(h, mask) for states, mask in zip(stacks, masks, strict=False) for h in states]
            sums = sums + torch.stack(moments).where(_real(part), 0.0)
        self._taught = output if len(parts) == 1 else None
        sum_over_ranks(sums)
        numbers, means, squares = sums.unbind(1)
        variances = iter((squares / numbers - (means / numbers).square()).unbind())
        return [[next(variances) for _ in states] for states in stacks]

    @torch.no_grad()
    def _step_sums(self, parts: list[Batch]) -> StepSums | None:
        """Return the sums by which the stage matches layers, of the whole step; None if it does not."""
        if not (self._listens and self.stage.matches):
            return None
        self.stage.over_step = sums = StepSums(self._divided)
        if self._divided:
            for i, part in enumerate(parts):
                self._terms(part, i, sums)
            sums.finish()
        return sums

    def _add_gradients(self, loss: Tensor, first: bool) -> None:
        """Do the backward of a micro-batch that is not its step's last one: the strategy reduces after the last."""
        if first:
            super().optimizer_zero_grad(self.current_epoch, 0, self.optimizers(use_pl_optimizer=False))  # type: ignore
        with torch.autocast(self.device.type, enabled=False):
            self.trainer.strategy.backward(loss, None)
        torch.clear_autocast_cache()  # weights in 16 bits, whose gradients are there already

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of the step before; Lightning asks for it when the micro-batches have added theirs."""
        if not self._divided:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def _real(part: Batch) -> Tensor:
    """Return whether a micro-batch has rows of its own, and not one that only fills up."""
    return part["index"][0] >= 0
