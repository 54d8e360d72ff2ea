"""Distillation of a compressed model: the stage of ``fit`` with which ``factorize --distil`` ends.

All parameters of the compressed model learn the dense model's logits and hidden states on texts. By default labels
have no weight in the loss, and the settings of :class:`Distillation` are

    L = L_logits + 10 sum over l of MSE(H^l, H_dense^l) / Var(H_dense^l)

with the same ratio of both terms as the stages of SecondOrder. Hidden states of language models are left out, and those
that have other axes. Nothing is dropped out. For a program of 4 bits the weights are rounded to these while they learn
(stages/rounded.py). The rest is the same as in any stage of ``fit``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from lit_compress.run.folder import Run
from lit_compress.run.job import Job
from lit_compress.run.runner import run_stage
from lit_compress.run.trainer import check_trainer, processes
from lit_compress.stages.base import Stage, Training, count_steps
from lit_compress.stages.compression import CompressedStage, Compression
from lit_compress.stages.distillation import Distillation
from lit_compress.stages.rounded import RoundedStage
from lit_compress.utils.errors import UserError

DISTIL = "distil"
LOSSES = Distillation(alpha=1.0, alpha_layers=10.0, mask_padding=True, relative=True)
RATE = 3e-4  # for 32 texts a step


@dataclass(frozen=True)
class Recovery:
    """How a compressed model is trained afterwards, by the options of ``factorize``; the first two count steps."""

    refine: int | None = None
    distil: int | None = None
    texts: str | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        for option, steps in (("refine", self.refine), ("distil", self.distil)):
            if steps is not None and steps < 1:
                raise UserError(f"--{option}: {steps} is below 1, the smallest valid value; usual: 100")
        for option, value in (("texts", self.texts), ("rate", self.rate)):
            if value is not None and self.distil is None:
                raise UserError(f"--distil_{option}: '{value}' is read by --distil only; add --distil 100")
        if self.rate is not None and not 0 < self.rate < 1:
            raise UserError(f"--distil_rate: {self.rate:g} is not between 0 and 1; usual: {RATE:g}")
        if self.texts is not None and not Path(self.texts).expanduser().is_file():
            raise UserError(f"--distil_texts: '{self.texts}' is no file; give one, e.g. texts.txt with a text a line")


class Distilling:
    """The stage ``distil`` of a run, whose ``job`` has the texts of the recovery as training rows."""

    def __init__(self, job: Job, recovery: Recovery, run: Run) -> None:
        steps, self.recovery, self.run = recovery.distil, recovery, run
        assert steps is not None, "no steps"
        if not job.method.distillation.on:
            raise UserError(
                "--distil: with distillation.alpha 0 and alpha_layers 0 nothing of the dense model is learned; "
                "nearest: --model.distillation.alpha 1"
            )
        texts = job.data.with_texts(recovery.texts)
        texts.devices = processes(job.trainer)
        if "labels" not in texts.train_tokens().column_names:
            place = f"--distil_texts: '{recovery.texts}'" if recovery.texts else "data.path: the training split"
            if job.method.kind.reads_labels:
                raise UserError(f"{place} has no labels, which this task's models read; give texts with them")
            if job.method.distillation.label_weight > 0:
                raise UserError(f"{place} has no labels; nearest: --model.distillation.alpha 1, which learns none")
        texts.accumulate = job.trainer.get("accumulate_grad_batches") or 1
        epoch = count_steps(texts.steps_per_epoch(), 1, job.trainer.get("limit_train_batches"))
        *_, stage = job.method.stages()
        classes, epochs = stage.settings, ceil(steps / max(epoch, 1))
        if classes.optimizer is not None and recovery.rate is not None:
            raise UserError(f"--distil_rate: the optimizer has its own; give --model.{stage.name}.optimizer.lr")
        self.training = Training(
            epochs, recovery.rate or RATE, optimizer=classes.optimizer, lr_scheduler=classes.lr_scheduler
        )
        self.job = job.at(data=texts, trainer=job.trainer | {"max_steps": steps})
        check_trainer(self.job.trainer)

    def fit(self, model: Path) -> None:
        """Run or continue the stage of the compressed ``model``, as :func:`run_stage`, unless it is finished.

        The run has the teacher.
        """
        if DISTIL not in self.run.finished():
            run_stage(self.job, self.made(), self.run, "", model)

    def made(self) -> Stage:
        """Return the stage, new, which drops nothing out."""
        kind = RoundedStage if self.job.choices.dtype == "int4" else CompressedStage
        stage = kind(DISTIL, self.training, Compression())
        stage.drops_out, stage.rate_option = False, "--distil_rate"
        return stage

    def told(self) -> dict[str, Any]:
        """Return the report's entry on the finished stage."""
        record, file, training = self.run.finished()[DISTIL], self.recovery.texts, self.training
        rate = training.learning_rate if training.optimizer is None else training.tried().defaults.get("lr")
        return {
            "steps": record["steps"], "best_step": record["best_step"], "batch": self.job.data.global_batch,
            "learning_rate": rate, "precision": self.job.trainer["precision"] or "32-true",
            "metric": [record["initial"], record["metric"]], "seconds": record["seconds"],
            "file": file and Path(file).name,
        }  # fmt: skip
