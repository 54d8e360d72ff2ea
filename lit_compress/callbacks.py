"""Observers of a stage: the bar, the checkpoints, the logger. None of them changes what is computed."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

if TYPE_CHECKING:
    from tqdm import tqdm


class Checkpoints(Callback):
    """Keep ``last.ckpt`` (where to continue) and ``best.ckpt`` (weights of the best epoch at budget, else the last).

    ``last`` is written between two batches, never after the last batch of an epoch: its validation belongs to
    it, and a run continued from there would skip it. Both files are renamed into place when complete.

    Args:
        folder: where.
        every: optimizer steps between two ``last.ckpt``.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.best = -inf
        self._saved = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best score so far."""
        return {"best": self.best, "saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best score so far."""
        self.best, self._saved = state_dict["best"], state_dict["saved"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save ``last.ckpt`` when it is due."""
        window_open = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches
        if trainer.global_step - self._saved >= self.every and not (trainer.is_last_batch or window_open):
            self._saved = trainer.global_step
            self._save(trainer, "last.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save ``best.ckpt`` when the score is better than before, and every time until one is at budget."""
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics["val/score"])
        if score > self.best or self.best == -inf or not (self.folder / "best.ckpt").exists():
            self.best = score
            self._save(trainer, "best.ckpt", weights_only=True)

    def _save(self, trainer: Trainer, name: str, weights_only: bool = False) -> None:
        temporary = self.folder / f".{name}.tmp"
        trainer.save_checkpoint(temporary, weights_only)
        if trainer.is_global_zero:
            os.replace(temporary, self.folder / name)


class StageBar(TQDMProgressBar):
    """A bar that says which stage of which method is running.

    Args:
        title: e.g. ``LPAF 2/3 prune``.
    """

    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10)
        self.title = title

    def init_train_tqdm(self) -> tqdm:
        """Name the training bar."""
        bar = super().init_train_tqdm()
        bar.set_description(self.title)
        return bar

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the epoch too."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(f"{self.title} epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """Leave out the version number; short names."""
        metrics = super().get_metrics(*args)
        return {k.removeprefix("train/"): v for k, v in metrics.items() if k not in ("v_num", "val/score")}


class RunLogger(TensorBoardLogger):
    """TensorBoard of a whole run: the steps of a stage follow those of the stages before.

    Args:
        folder: the run folder.
        offset: optimizer steps of the earlier stages.
        purge_step: forget what was logged from this step on; set when a stage is continued.
    """

    def __init__(self, folder: Path, offset: int, purge_step: int | None = None) -> None:
        super().__init__(
            save_dir=folder, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step
        )
        self.offset = offset

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log at the step of the run; the epoch is not shown."""
        shown = {k: v for k, v in metrics.items() if k != "epoch" and v != -inf}
        if shown:
            super().log_metrics(shown, (step or 0) + self.offset)
