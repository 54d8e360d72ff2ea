"""Run a method's stages one after another in this process, each with a fresh Trainer; continue where a run stopped.

Every stage starts from files (the net of the stage before) and leaves files, so that a run continued in
another process does exactly what an uninterrupted one does, on one device, under DDP and under FSDP2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_compress.analysis.pictures import log_structure
from lit_compress.analysis.widths import log_widths
from lit_compress.backbones import empty_net, load_config, load_finetuned, load_tokenizer
from lit_compress.callbacks import Checkpoints, RunLogger, StageBar
from lit_compress.errors import UserError
from lit_compress.evaluation import constant_score, evaluate
from lit_compress.export.fuse import compact
from lit_compress.families import find_sites
from lit_compress.methods.base import Method, check_mark
from lit_compress.methods.stage import Stage, count_steps
from lit_compress.runs import Run
from lit_compress.surgery import atomic_folder, save_net

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from lit_compress.data.datamodule import DataModule


@dataclass
class Parts:
    """What the command line builds anew for every stage: method, data and the arguments of the Trainer."""

    method: Method
    data: DataModule
    trainer: dict[str, Any]
    seed: int


def check_stages(parts: Parts) -> None:
    """Refuse what can be seen to fail before a stage is started: data, architecture, ranks, schedules.

    Raises:
        UserError: the first thing that is wrong.
    """
    method, data, trainer = parts.method, parts.data, parts.trainer
    config = load_config(method.backbone, method.task_record)
    with torch.device("meta"):
        net = empty_net(config)
    find_sites(net)
    if method.teacher:
        _check_given_teacher(method, config)
    make_trainer(**trainer | {"logger": False, "enable_checkpointing": False})
    data.prepare_data()
    accumulate = trainer.get("accumulate_grad_batches") or 1
    for stage in method.stages():
        stage.check(net)
        stage.check_data(data.train_size())
        steps = count_steps(
            data.batches_per_epoch(),
            stage.training_settings.epochs,
            accumulate,
            trainer.get("limit_train_batches"),
            trainer.get("max_steps"),
        )
        stage.begin(steps)


def _check_given_teacher(method: Method, config: PreTrainedConfig) -> None:
    """Refuse a teacher that reads other tokens, or whose hidden states are asked for and have another width.

    Raises:
        UserError: it does.
    """
    teacher = load_config(str(method.teacher), method.task_record)
    if method.distillation.alpha_layers > 0 and teacher.hidden_size != config.hidden_size:
        raise UserError(
            f"model.teacher: '{method.teacher}' is {teacher.hidden_size} wide, the backbone {config.hidden_size}; give "
            "a teacher of the same width, or distillation.alpha_layers 0"
        )
    vocabularies = [load_tokenizer(name, method.task_record).get_vocab() for name in (method.teacher, method.backbone)]
    if vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"model.teacher: '{method.teacher}' has another tokenizer than the backbone ({len(vocabularies[0])} and "
            f"{len(vocabularies[1])} tokens); give a teacher made from model.backbone"
        )


def run_stages(build: Callable[[], Parts], run: Run, ckpt_path: str | None, every: int) -> None:
    """Run every unfinished stage of the method.

    Args:
        build: makes fresh parts.
        run: the run folder, begun.
        ckpt_path: ``last`` or a checkpoint file to continue from; None starts the first stage.
        every: optimizer steps between two checkpoints.

    Raises:
        UserError: a checkpoint is corrupt, or of another run.
    """
    parts = build()
    stages = parts.method.stages()
    if parts.method.teacher and "dense" not in run.finished():
        _adopt_teacher(build(), run)
    names = ["dense", *(s.name for s in stages)] if parts.method.teacher else [s.name for s in stages]
    for number, name in enumerate(names):
        if name in run.finished() or name not in [s.name for s in stages]:
            continue
        parts = build()
        stage = next(s for s in parts.method.stages() if s.name == name)
        if stage.distil and parts.method.distillation.on:
            _check_teacher(parts, run)
        previous = _previous(names, number, stage, run)
        checkpoint = _find_checkpoint(run, parts.method, stage, ckpt_path)
        structure = read_checkpoint(checkpoint)["lit_compress"]["structure"] if checkpoint else None
        parts.method.enter(stage, parts.seed, previous, run.net("dense") if name != "dense" else None, structure)
        start = time.time()
        run.stage(name).mkdir(parents=True, exist_ok=True)
        title = f"{type(parts.method).__name__} {number + 1}/{len(names)} {name}"
        trainer = _trainer(parts, run, stage, title, checkpoint, every)
        rank_zero_info(f"{title}: {'continues' if checkpoint else 'starts'}")
        trainer.fit(parts.method, parts.data, ckpt_path=checkpoint)
        if trainer.interrupted:
            raise KeyboardInterrupt
        _leave(build(), stage.name, previous, run, trainer, time.time() - start)
        barrier()


def _previous(names: list[str], number: int, stage: Stage, run: Run) -> Path | None:
    """Return the net the stage starts from: the stage before, unless it wants the pre-trained backbone."""
    return run.net(names[number - 1]) if number and not stage.from_backbone else None


def _trainer(parts: Parts, run: Run, stage: Stage, title: str, checkpoint: Path | None, every: int) -> Trainer:
    """Build the Trainer of one stage from the user's arguments and what the stage brings."""
    offset = sum(record["steps"] for record in run.finished().values())
    arguments = dict(parts.trainer)
    callbacks = [Checkpoints(run.stage(stage.name), every)]
    if arguments.get("enable_progress_bar") is not False:
        callbacks.append(StageBar(title))  # type: ignore[arg-type]
    if arguments.get("logger") in (None, True):
        step = torch.load(checkpoint, weights_only=True, mmap=True)["global_step"] if checkpoint else None
        arguments["logger"] = RunLogger(run.folder, offset, None if step is None else offset + step + 1)
    arguments["callbacks"] = [*(arguments.get("callbacks") or []), *callbacks]
    own = {
        "max_epochs": stage.training_settings.epochs,
        "default_root_dir": run.stage(stage.name),
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": -1,  # a whole validation before training: the metric right after a factorization
    }
    return make_trainer(**arguments | own)


def make_trainer(**arguments: Any) -> Trainer:
    """Build a Trainer.

    Raises:
        UserError: Lightning does not take the arguments on this machine.
    """
    try:
        return Trainer(**arguments)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error


def _find_checkpoint(run: Run, method: Method, stage: Stage, ckpt_path: str | None) -> Path | None:
    """Return the checkpoint to continue ``stage`` from, checked; None to start it.

    Raises:
        UserError: it is missing, corrupt or foreign.
    """
    if ckpt_path is None:
        return None
    path = run.stage(stage.name) / "last.ckpt"
    if ckpt_path != "last":
        given = Path(ckpt_path).expanduser().resolve()
        if not given.is_file():
            raise UserError(f"ckpt_path: no file '{ckpt_path}'; give `last`, or a last.ckpt of this run folder")
        if given.parent != run.stage(stage.name):
            mark = read_checkpoint(given).get("lit_compress") or {}
            if not mark or given.parent.parent != run.folder:
                raise UserError(f"ckpt_path: '{ckpt_path}' is not a checkpoint of this run; give `last`")
            return None  # of a stage that is finished already
        path = given
    if not path.is_file():
        return None
    check_mark(read_checkpoint(path), type(method).__name__, stage.name)
    return path


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint without running code from it.

    Raises:
        UserError: it is corrupt.
    """
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise UserError(
            f"ckpt_path: '{path}' is not a readable checkpoint ({type(error).__name__}); "
            "remove it to start its stage anew, or give another"
        ) from error


@rank_zero_only
def _leave(parts: Parts, name: str, previous: Path | None, run: Run, trainer: Trainer, seconds: float) -> None:
    """Write the best net of a finished stage, what the next stage needs, and its record."""
    folder = run.stage(name)
    checkpoint = read_checkpoint(folder / "best.ckpt")
    mark = check_mark(checkpoint, type(parts.method).__name__, name)
    if not mark["at_budget"]:
        rank_zero_warn(f"{name}: no epoch ended at the target; the last is kept; train longer, e.g. {name}.epochs")
    stage = next(s for s in parts.method.stages() if s.name == name)
    parts.method.enter(stage, parts.seed, previous, None, mark["structure"])
    parts.method.configure_model()
    parts.method.load_state_dict(checkpoint["state_dict"])
    net = parts.method.net
    assert net is not None
    stage.begin(mark["total_steps"])
    with atomic_folder(run.net(name)) as temporary:
        stage.finish(net, temporary)
        small = compact(net)
        save_net(small, temporary)
        parts.data.tokenizer.save_pretrained(temporary)
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            log_structure(logger, small, name, mark["total_steps"])
            log_widths(logger, small, run.net(name), name, mark["total_steps"])
            for key, value in mark["metrics"].items():
                logger.experiment.add_scalar(f"stage/{name} {key}", value, logger.offset + checkpoint["global_step"])
            logger.finalize("success")
    record = {
        "name": name, "metric": mark["metrics"], "initial": mark["initial"], "steps": trainer.global_step,
        "best_step": checkpoint["global_step"], "seconds": round(seconds, 1), "at_budget": mark["at_budget"],
    }  # fmt: skip
    run.finish(record)
    with suppress(FileNotFoundError):
        (folder / "last.ckpt").unlink()  # the stage is finished, nothing continues from here


def _adopt_teacher(parts: Parts, run: Run) -> None:
    """Take the given teacher for the dense stage: copy it into the run and measure it."""
    if rank_zero_only.rank != 0:
        while "dense" not in run.finished():  # no process group yet to wait in
            time.sleep(0.2)
        return
    method = parts.method
    net = load_finetuned(str(method.teacher), method.task_record)
    with atomic_folder(run.net("dense")) as temporary:
        save_net(net, temporary)
        parts.data.tokenizer.save_pretrained(temporary)
    metric = evaluate(net, parts.data)
    run.finish({"name": "dense", "metric": metric, "initial": metric, "steps": 0, "teacher": str(method.teacher)})


def _check_teacher(parts: Parts, run: Run) -> None:
    """Compare the teacher's dev metric, measured when it was made or adopted, with that of a constant answer.

    Raises:
        UserError: the logits of a given teacher are worse than a constant; its labels may be permuted.
    """
    method, name = parts.method, parts.data.record.metrics[0]
    found, floor = run.finished()["dense"]["metric"][f"val/{name}"], constant_score(parts.data)
    if found > floor:
        return
    finding = f"dev {name} {found:.4f}, the best constant answer has {floor:.4f}"
    if not method.teacher:
        rank_zero_warn(f"model.dense: the teacher has learned nothing ({finding}); train it longer, e.g. dense.epochs")
    elif found < floor and method.distillation.alpha > 0:
        raise UserError(f"model.teacher: '{method.teacher}' has {finding}; are its labels in another order?")
    else:
        rank_zero_warn(f"model.teacher: '{method.teacher}' has {finding}; it can teach little")


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
