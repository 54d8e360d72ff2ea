"""A callback that counts what a training step asks of the second device of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import second_device

FILE = "device.json"
NAMES = ("waits", "to_host", "to_device", "calls")


class Counts(Callback):
    """Write waits, copies and operator calls of every step of a stage to its folder, as FILE.

    A step is what happens from the end of one batch to the end of the next: the copy of the batch, forwards,
    backward, optimizer, the stage's own work. The first of an epoch is left out.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._before: dict[str, int] | None = None
        self._inside = self._teacher = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the calls of the teacher's forwards by themselves."""

        def begin(*_: Any) -> None:
            self._inside = second_device.counts()["calls"]

        def end(*_: Any) -> None:
            self._teacher += second_device.counts()["calls"] - self._inside

        for teacher in pl_module._teacher:  # type: ignore[union-attr]
            teacher.register_forward_pre_hook(begin)
            teacher.register_forward_hook(end)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Forget the validation before."""
        self._before = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the step."""
        now = second_device.counts() | {"teacher": self._teacher}
        if self._before is not None:
            self.steps.append({name: now[name] - self._before[name] for name in (*NAMES, "teacher")})
        self._before = now

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the steps."""
        Path(trainer.default_root_dir, FILE).write_text(json.dumps(self.steps))
