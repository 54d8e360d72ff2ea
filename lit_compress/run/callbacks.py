"""Lightning callbacks of a stage: checkpoints and the progress bar. They do not change what is computed."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

if TYPE_CHECKING:
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class Checkpoints(Callback):
    """Keep ``last.ckpt`` (to continue from) and ``best.ckpt`` (weights of the best epoch at budget, else the last).

    ``last.ckpt`` is never written after the last batch of an epoch or of the fit: a run continued from there would
    skip the validation that follows. Both files are renamed into place when complete.

    Args:
        folder: folder of the stage.
        every: optimizer steps between two ``last.ckpt``.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.best = -inf
        self._saved = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best score so far and the step of ``last.ckpt``."""
        return {"best": self.best, "saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the best score so far and the step of ``last.ckpt``."""
        self.best, self._saved = state_dict["best"], state_dict["saved"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save ``last.ckpt`` if it is due; if ``max_steps`` ends the fit within an epoch, ask for a validation."""
        window_open = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches
        last = trainer.is_last_batch or trainer.global_step == trainer.max_steps
        trainer.should_stop |= last and not trainer.is_last_batch
        if trainer.global_step - self._saved >= self.every and not (last or window_open):
            self._saved = trainer.global_step
            self._save(trainer, "last.ckpt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save ``best.ckpt`` if the score is better than before, or if no epoch has been at budget yet."""
        if trainer.sanity_checking:
            return
        score = float(trainer.callback_metrics["val/score"])
        if score > self.best or self.best == -inf or not (self.folder / "best.ckpt").exists():
            self.best = score
            self._save(trainer, "best.ckpt", weights_only=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what a stage of no epochs was built with."""
        if trainer.max_epochs == 0:
            self._save(trainer, "best.ckpt", weights_only=True)

    def _save(self, trainer: Trainer, name: str, weights_only: bool = False) -> None:
        temporary = self.folder / f".{name}.tmp"
        trainer.save_checkpoint(temporary, weights_only)
        if trainer.is_global_zero:
            os.replace(temporary, self.folder / name)


class EpochLines(Callback):
    """Print one line for every finished epoch, which stays in the terminal and in a log.

    Args:
        title: e.g. ``LPAF 2/3 prune``.
    """

    def __init__(self, title: str) -> None:
        self.title = title

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the epoch ended with; nothing for the validation before training."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        shown = [f"{short} {values[name]:.4f}" for name, short in _SHOWN.items() if name in values]
        shown += [
            f"{name.removeprefix('val/')} {value:.4f}" for name, value in values.items() if name.startswith("val")
        ]
        place = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, step {trainer.global_step}"
        tqdm.write(f"{self.title}: {place}: {', '.join(s for s in shown if not s.startswith('score '))}")


_SHOWN = {"train/loss": "loss", "train/density": "density"}


class StageBar(TQDMProgressBar):
    """A bar that says which stage of which method is running, and which epoch; it goes when the epoch is over.

    Args:
        title: method and stage, e.g. ``LPAF 2/3 prune``.
    """

    def __init__(self, title: str) -> None:
        super().__init__(refresh_rate=10)
        self.title = title

    def init_train_tqdm(self) -> Tqdm:
        """Make a bar that does not stay: :class:`EpochLines` prints what does."""
        bar = super().init_train_tqdm()
        bar.leave = False
        return bar

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the epoch also where a stage is continued in the middle of one."""
        super().on_train_start(trainer, *args)
        self._describe(trainer)

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the epoch."""
        super().on_train_epoch_start(trainer, *args)
        self._describe(trainer)

    def _describe(self, trainer: Trainer) -> None:
        self.train_progress_bar.set_description(f"{self.title} epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """Return the metrics for the bar, with short names, without the version number."""
        metrics = super().get_metrics(*args)
        return {k.removeprefix("train/"): v for k, v in metrics.items() if k not in ("v_num", "val/score")}
