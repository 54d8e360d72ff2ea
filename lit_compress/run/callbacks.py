"""Lightning callbacks of a stage: checkpoints, steps that are left out, and the progress bar.

They do not change the computation while loss and gradients are finite.
"""

from __future__ import annotations

import os
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar
from torch.optim import Optimizer
from tqdm import tqdm

from lit_compress.numerics.foreach import largest
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import local, sum_over_ranks

MOST_SKIPPED = 20  # optimizer steps in a row
_SHOWN = {"train/loss": "loss", "val/loss": "dev loss", "train/density": "density", "val/score": ""}  # in lines
_IN_BAR = ("loss", "density", "target", "skipped")  # what the stage logs


class _Kept(Callback):
    kept: frozenset[str]  # attributes that checkpoints have

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.kept & state_dict.keys():  # version 0.2 kept fewer
            setattr(self, name, state_dict[name])


class Checkpoints(_Kept):
    """Keep ``last.ckpt`` (to continue from) and ``best.ckpt`` (weights of the best epoch at budget, else the last).

    The model before training counts as an epoch, the last one to be chosen of equal scores.

    ``last.ckpt`` is never written after a batch that a validation follows, such as the last of the fit: a run continued
    from there would skip it; nor after a step that was left out, as the weights may be broken. Both files are
    renamed into place when they are complete and on the disk.

    ``every`` optimizer steps there is a ``last.ckpt``.

    Attributes:
        best: score so far; ``untrained`` if it is from before training.
        saved: step of ``last.ckpt``.
    """

    kept = frozenset({"best", "untrained", "saved"})

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.best, self.untrained, self.saved = -inf, False, 0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save ``best.ckpt`` if the model before training is at budget and has learned the task."""
        score = float(pl_module.untrained)  # type: ignore[arg-type]
        if score > -inf and trainer.max_epochs:
            self.best, self.untrained = score, True
            pl_module.stage.keep_untrained(pl_module.net)  # type: ignore[union-attr, operator]
            self._save(trainer, "best.ckpt", weights_only=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save ``last.ckpt`` if it is due or SIGTERM ends the process; let the last step end with a validation."""
        loop = trainer.fit_loop
        validates = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
        if trainer.global_step == pl_module.stage.total_steps and not validates:  # type: ignore[union-attr]
            trainer.should_stop = validates = True
        # if any rank was told to end, all do after this batch, and not in the middle of one
        told = trainer.strategy.reduce_boolean_decision(trainer.received_sigterm, all=False)
        trainer._signal_connector.received_sigterm = told
        due = told or trainer.global_step - self.saved >= self.every
        if due and trainer.global_step > self.saved and not (trainer.is_last_batch or validates or pl_module.skips):
            self.saved = trainer.global_step
            self._save(trainer, "last.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save ``best.ckpt`` if the score is better than before, or if no epoch has been at budget yet."""
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics["val/score"])
        better = score > self.best or (self.untrained and score == self.best)
        if better or self.best == -inf or not (self.folder / "best.ckpt").exists():
            self.best, self.untrained = score, False
            self._save(trainer, "best.ckpt", weights_only=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the untrained model of a stage without epochs; say that no epoch was better than it."""
        if trainer.max_epochs == 0:
            self._save(trainer, "best.ckpt", weights_only=True)
        if self.untrained:
            stage: Any = pl_module.stage
            metric = pl_module.task.metrics[0]  # type: ignore[union-attr, index]
            note(
                f"{stage.name}: the model before training, dev {metric} {abs(self.best):.4f}, is better than every "
                f"epoch at the budget: it is kept; try a smaller {stage.rate_option}"
            )

    def _save(self, trainer: Trainer, name: str, weights_only: bool = False) -> None:
        temporary, path = self.folder / f".{name}.tmp", self.folder / name
        try:
            trainer.save_checkpoint(temporary, weights_only)
            if trainer.is_global_zero:
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class FiniteSteps(_Kept):
    """Leave out optimizer steps whose gradients are not finite; stop after too many in a row.

    Weights, moments of AdamW and scores stay as they are in such a step; schedules go on. Each is counted as
    ``train/skipped``. ``precision 16-mixed`` begins with a few of them, while it looks for the scale of its loss. At
    :data:`MOST_SKIPPED` in a row the fit ends with a :class:`UserError`.
    """

    kept = frozenset({"skipped", "in_a_row"})  # steps that were left out, in all and now

    def __init__(self) -> None:
        self.skipped, self.in_a_row = 0, 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradients away if one of them is not finite on any rank; called before the method reads them."""
        pl_module.skips = not _finite(optimizer, pl_module.device)  # type: ignore[assignment]
        if not pl_module.skips:
            self.in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        pl_module.log("train/skipped", float(self.skipped))
        if self.in_a_row >= MOST_SKIPPED:
            stage: Any = pl_module.stage
            raise UserError(
                f"{stage.name}: loss or gradients of {self.in_a_row} steps in a row were not finite, the last in step "
                f"{trainer.global_step + 1}; try a smaller {stage.rate_option}, or trainer.precision 32-true"
            )


def _finite(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the gradients of all ranks are finite."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    grads = [grad for grad in map(local, held) if grad.numel()]  # FSDP2 leaves a rank nothing of a short one
    highest = largest(grads) if grads else torch.zeros((), device=device)
    sum_over_ranks(highest)  # an inf or a NaN stays one
    return isfinite(highest.item())  # the one wait for the device in a training step


class EpochLines(Callback):
    """Print one line for every finished epoch, which stays in the terminal and in a log, with a ``title``.

    Loggers count the ``offset`` optimizer steps of earlier stages as well.
    """

    def __init__(self, title: str, offset: int) -> None:
        self.title, self.offset = title, offset

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Let loggers have the steps of the run."""
        trainer.fit_loop.epoch_loop._batches_that_stepped = self.offset + trainer.global_step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch's final values; nothing for the validation before training."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = trainer.callback_metrics
        names = _SHOWN | {name: name[4:] for name in values if name.startswith("val/") and name not in _SHOWN}
        shown = ", ".join(f"{short} {float(values[n]):.4f}" for n, short in names.items() if short and n in values)
        place = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, step {trainer.global_step}"
        tqdm.write(f"{self.title}: {place}: {shown}")


class StageBar(TQDMProgressBar):
    """Lightning's progress bar, with the loss and the density."""

    def get_metrics(self, trainer: Trainer, *args: Any) -> dict[str, Any]:
        """Return the metrics for the bar, with short names, without the version number.

        The training values are read here, when the bar is drawn: the host waits for values on the device.
        """
        metrics = {k: v for k, v in super().get_metrics(trainer, *args).items() if k not in ("v_num", "val/score")}
        known = trainer.callback_metrics
        return {name: float(known[f"train/{name}"]) for name in _IN_BAR if f"train/{name}" in known} | metrics
