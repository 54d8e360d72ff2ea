"""A callback that times the training steps of every stage on an accelerator and reads its peak of memory."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_compress.utils.devices import peak_bytes

SKIPPED = 5  # first steps of an epoch


class Done(Exception):
    """The last stage is trained."""


class StepTimes(Callback):
    """Keep the median time of a step, from the end of one batch to the end of the next, of every stage."""

    rows: ClassVar[list[dict[str, Any]]] = []
    last: ClassVar[str | None] = None  # the stage after which the run ends; None: the method's last

    def __init__(self) -> None:
        self._times: list[float] = []
        self._before: float | None = None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin a stage."""
        self._times = []
        torch.accelerator.reset_peak_memory_stats()

    def on_train_epoch_start(self, *_: Any) -> None:
        """Forget the validation before."""
        self._before = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *words: Any) -> None:
        """Note the step."""
        torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._before is not None and words[-1] >= SKIPPED:
            self._times.append(1000 * (now - self._before))
        self._before = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the stage's row; end the run after the last one.

        Raises:
            Done: it was the last stage.
        """
        method: Any = pl_module
        peak = peak_bytes(method.device)
        self.rows.append({
            "stage": method.stage.name, "ms": median(self._times) if self._times else None, "steps": len(self._times),
            "peak_mb": peak and peak / 1e6,
        })  # fmt: skip
        if method.stage.name == (self.last or method.stages()[-1].name):
            raise Done
