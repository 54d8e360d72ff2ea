"""Differences between a continued run and its start: data, length of the stage, version of the code.

Options are compared by run/folder.py. Without ``--allow_changed`` the first difference ends the command; with it, it is
written down in RUN/changed.json, in the record of the stage, and in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_compress.run.folder import ConfigChange, Run
from lit_compress.run.trainer import stage_steps
from lit_compress.stages.base import Training
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note
from lit_compress.version import __version__

if TYPE_CHECKING:
    from lit_compress.data.datamodule import DataModule
    from lit_compress.methods.base import Method
    from lit_compress.stages.base import Stage


_TRAINING = tuple(field.name for field in fields(Training))  # how options that a stage can go on with end


class OtherData(Callback):
    """Let a stage continue from a checkpoint with other data than it was begun with."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Treat the data as the checkpoint's, before the method compares them."""
        pl_module.saved_data = trainer.datamodule.fingerprint()  # type: ignore[attr-defined]


def go_on(
    run: Run, config: dict[str, Any], changed: list[ConfigChange], method: Method, budget: dict[str, Any] | None = None
) -> Callable[[], None]:
    """Return a function that gives the run another config with its ``budget``, and records the differences.

    They hold from the next stage on. Its checkpoints go if the model in them is of the former options.

    Raises:
        UserError: the run is finished: its models would not match the config.
    """
    if (run.folder / "report.json").is_file():
        raise UserError(f"allow_changed: '{run.folder}' is finished, nothing would change; give another --run_dir")
    stage = next((stage.name for stage in method.stages() if stage.name not in run.finished()), "export")

    def change() -> None:
        if option := next((c["what"] for c in changed if _shapes_model(c["what"], stage, method)), None):
            run.drop_checkpoints(stage)
            note(f"{stage}: begins again, as {option} has changed")
        run.change(config, changed, stage, budget)

    return change


def _shapes_model(option: str, stage: str, method: Method) -> bool:
    """Whether the model of a stage depends on an option; training and distillation may go on otherwise."""
    part, *names = option.split(".")
    alone = {"distillation", "dense", *(other.name for other in method.stages())}
    own = names[:1] == [stage] or (stage != "dense" and names[0] not in alone)
    return part == "model" and own and not names[-1].endswith(_TRAINING)


def check_unchanged(run: Run, data: DataModule, mark: dict[str, Any], allowed: bool) -> list[ConfigChange]:
    """Return the differences of data and code from the finished stages and the current checkpoint.

    Args:
        run: whose records of earlier versions may not say.
        data: as it is now.
        mark: of the checkpoint; empty where a stage begins.
        allowed: return it; a stage that continues compares its data by itself otherwise.

    Raises:
        UserError: something differs, and is not ``allowed``.
    """
    changes: list[ConfigChange] = []
    versions = [known for record in (*run.finished().values(), mark) if (known := record.get("version"))]
    if other := next((known for known in versions if known != __version__), None):
        if not allowed:
            raise UserError(
                f"ckpt_path: lit_compress {other} made '{run.folder}', this is {__version__}; continue with "
                "that, or with --allow_changed"
            )
        changes.append({"what": "version", "was": other, "now": __version__})
    if step := _other_step(run, data, mark):
        if not allowed:
            said = (
                f"of '{run.folder}' was {step['was']}, now {step['now']} (batch_size, accumulate_grad_batches, devices)"
            )
            raise UserError(
                f"data.batch_size: the global batch {said}; give the same product, or --allow_changed"
                if step["what"] == "global batch"
                else f"data.batch_size: the split {said}; vectors are compared with the others of a micro-batch; give "
                "the same numbers, or --allow_changed"
            )
        changes.append(step)
        return changes  # the fingerprint of the data has it
    before = next((record for record in run.finished().values() if "data" in record), None)
    if before is not None and before["data"] != data.fingerprint():
        if not allowed:
            raise UserError(
                f"data.path: the data is not that of stage {before['name']} of '{run.folder}'; give the same, or "
                "--allow_changed"
            )
        changes.append({"what": "data", "was": before["data"], "now": data.fingerprint()})
    elif allowed and mark and mark["data"] != data.fingerprint():
        changes.append({"what": "data", "was": mark["data"], "now": data.fingerprint()})
    return changes


def _other_step(run: Run, data: DataModule, mark: dict[str, Any]) -> ConfigChange | None:
    """Return how the optimizer steps differ from the steps of the finished stages and the current checkpoint.

    The losses of vectors compare the texts of a micro-batch, so that every split of a step makes another one.
    """
    what = "split" if task_type(data.record).loss == "vectors" else "global batch"
    if mark and "split" not in mark and data.split[1:] != [1, 1]:  # of 0.2, whose positions counted micro-batches
        return {"what": "split", "was": None, "now": data.split}
    for record in (*run.finished().values(), mark):
        was = record.get("split") or data.split
        if what == "split" and was != data.split:
            return {"what": what, "was": was, "now": data.split}
        if prod(was) != prod(data.split):
            return {"what": what, "was": prod(was), "now": prod(data.split)}
    return None


def other_length(stage: Stage, data: DataModule, trainer: dict[str, Any], mark: dict[str, Any]) -> list[ConfigChange]:
    """Return the number of a stage's steps if it differs from the checkpoint's: then the stage starts again."""
    if not mark:
        return []
    steps = stage_steps(stage, data, trainer)
    return [] if steps == mark["total_steps"] else [{"what": "steps", "was": mark["total_steps"], "now": steps}]


def changed_line(change: ConfigChange) -> str:
    """Return one line on a change."""
    return f"{change['what']} was {change['was']}, from stage {change['stage']} on {change['now']}"
