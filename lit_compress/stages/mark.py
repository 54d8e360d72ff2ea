"""The program, the method and the stage that wrote a checkpoint."""

from __future__ import annotations

from typing import Any

from lit_compress.utils.errors import UserError


def check_mark(checkpoint: dict[str, Any], method: str, stage: str) -> dict[str, Any]:
    """Return the mark that ``Method.on_save_checkpoint`` added to a checkpoint.

    Raises:
        UserError: another program, method or stage wrote the checkpoint.
    """
    mark = checkpoint.get("lit_compress")
    if mark is None:
        raise UserError("ckpt_path: this checkpoint was not written by lit_compress; give `last` or one of this run")
    if (mark["method"], mark["stage"]) != (method, stage):
        raise UserError(
            f"ckpt_path: the checkpoint is of {mark['method']}, stage {mark['stage']}, not of {method}, stage {stage}"
        )
    return mark
