"""The method and stage in a checkpoint, and the checks before a stage continues from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lit_compress.models.surgery import describe
from lit_compress.stages.base import Stage
from lit_compress.utils.errors import UserError
from lit_compress.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Checkpointed(pl.LightningModule):
    """The part of a method that writes and reads checkpoints."""

    net: PreTrainedModel
    stage: Stage
    initial: dict[str, float]

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


def check_mark(checkpoint: dict[str, Any], method: str, stage: str) -> dict[str, Any]:
    """Return the mark that ``Method.on_save_checkpoint`` added to a checkpoint.

    Raises:
        UserError: another program, method or stage wrote the checkpoint.
    """
    mark = checkpoint.get("lit_compress")
    if mark is None:
        raise UserError("ckpt_path: this file was not written by lit_compress; remove it to start its stage again")
    if (mark["method"], mark["stage"]) != (method, stage):
        raise UserError(
            f"ckpt_path: the checkpoint is of {mark['method']}, stage {mark['stage']}, not of {method}, stage {stage}"
        )
    return mark
