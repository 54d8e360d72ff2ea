"""``factorize --distil``: a stage of ``fit`` that continues from a model that was compressed before."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.calibration.statistics import TOKENS
from lit_compress.models.accounting import dense_site_params
from lit_compress.run.folder import Run
from lit_compress.run.job import Job
from lit_compress.run.runner import run_stage
from lit_compress.run.trainer import check_trainer, processes
from lit_compress.stages.base import Training, count_steps
from lit_compress.stages.distil import RATE, DistilStage, Recovery
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods import Method

DISTIL = "distil"


class Distilling:
    """The stage ``distil``, which trains a compressed model.

    Texts of a language model go through it in micro-batches of at most 512 tokens.

    Args:
        job: with the Trainer's arguments.
        recovery: steps, texts and learning rate.
        run: the run folder.

    Attributes:
        texts: the same data with these texts as training rows.

    Raises:
        UserError: the Trainer's arguments or the texts cannot be used.
    """

    def __init__(self, job: Job, recovery: Recovery, run: Run) -> None:
        steps = recovery.distil
        assert steps is not None, "no steps"
        self.recovery, self.run = recovery, run
        self.texts = texts = job.data.with_texts(recovery.texts)
        texts.devices = processes(job.trainer)
        check_labels(job.method, texts, recovery)
        size, texts.accumulate = texts.batch_size, job.trainer.get("accumulate_grad_batches") or 1
        if job.method.kind.over_vocabulary:
            most = max(1, TOKENS // texts.train_dataloader().largest[1])
            texts.batch_size = max(part for part in range(1, min(most, size) + 1) if size % part == 0)
            texts.accumulate *= size // texts.batch_size
        epoch = count_steps(texts.steps_per_epoch(), 1, job.trainer.get("limit_train_batches"))
        self.training = Training(epochs=ceil(steps / max(epoch, 1)), learning_rate=recovery.rate or RATE)
        self.job = job.at(data=texts, trainer=job.trainer | {"max_steps": steps})
        check_trainer(self.job.trainer, {DISTIL: self.training.epochs})

    def fit(self, dense: PreTrainedModel, model: Path, every: int = 500, skips: int = 20) -> None:
        """Run or continue the stage.

        Args:
            dense: the teacher, on the CPU, before and afterwards.
            model: folder of the compressed model.
            every: optimizer steps between two checkpoints.
            skips: optimizer steps in a row without finite gradients at which the run stops.

        Raises:
            UserError: gradients are not finite, or a checkpoint is of other data.
        """
        weights = dense_site_params(dense)
        run_stage(self._made, self.run, "", model, lambda: dense, weights, "last", every, skips)

    def told(self) -> dict[str, Any]:
        """Return the report's entry on the finished stage."""
        record, file = self.run.finished()[DISTIL], self.recovery.texts
        return {
            "steps": record["steps"], "best_step": record["best_step"], "batch": self.texts.global_batch,
            "learning_rate": self.training.learning_rate, "precision": self.job.trainer["precision"] or "32-true",
            "metric": [record["initial"], record["metric"]], "seconds": record["seconds"],
            "file": file and Path(file).name,
        }  # fmt: skip

    def _made(self) -> tuple[Job, DistilStage]:
        made = self.job.at()
        self.texts.trainer = None  # of the fit before: without one, scores are of the dev set, not of held-out rows
        return made, DistilStage(self.training)


def check_labels(method: Method, texts: DataModule, recovery: Recovery) -> None:
    """Refuse texts without labels where the model or the loss reads them.

    Raises:
        UserError: see above.
    """
    if "labels" in texts.train_tokens().column_names:
        return
    place = f"--distil_texts: '{recovery.texts}'" if recovery.texts else "data.path: the training split"
    if method.kind.reads_labels:
        raise UserError(f"{place} has no labels, which this task's models read; give texts with them")
    if method.distillation.label_weight > 0:
        raise UserError(f"{place} has no labels; nearest: --model.distillation.alpha 1, which learns none")
