"""Running the stages of a method one after another, each with a new Trainer; continuing a run that was stopped.

Every stage reads files (the model of the stage before) and writes files, so that a run that is continued in
another process ends exactly as an uninterrupted one, on one device, under DDP and under FSDP2.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import constant_answer, evaluate
from lit_compress.evaluation.intervals import near_chance
from lit_compress.export.card import origin_of
from lit_compress.export.fuse import fuse
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.backbones import load_finetuned
from lit_compress.run.callbacks import Checkpoints, EpochLines, FiniteSteps, StageBar
from lit_compress.run.first import of_first
from lit_compress.run.folder import Run, write_net
from lit_compress.run.job import Job
from lit_compress.run.loggers import Curves, log_stage
from lit_compress.run.trainer import forget, make_trainer, processes, read_checkpoint
from lit_compress.stages.base import Stage
from lit_compress.stages.rounded import RoundedStage
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, peak_bytes
from lit_compress.utils.errors import UserError, as_shown
from lit_compress.utils.files import atomic_folder
from lit_compress.utils.memory import peak_mib
from lit_compress.utils.progress import note
from lit_compress.version import __version__

SMALL = 3_000_000  # weights in the blocks' matrices; below, a run has one thread
_WRONG = ("Early stopping conditioned", "val_check_interval")  # beginnings of Lightning's messages
_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run_stages(job: Job, run: Run) -> None:
    """Run every unfinished stage of the method from where it stopped.

    Args:
        job: settled and checked.
        run: the run folder, with its config.

    Raises:
        UserError: a checkpoint is corrupt, or belongs to another run; or a stage does not compute finite gradients.
    """
    job.data.devices = processes(job.trainer)
    _check_rows(run, job.data, [*run.finished().values()][-1:])  # also of a finished run
    names = [stage.name for stage in job.method.stages()]
    if job.method.teacher:
        names.insert(0, "dense")
        of_first("dense", partial(_adopt_teacher, job, run), job.trainer)
    for number, name in enumerate(names):
        if name in run.finished():
            continue
        stage = next(stage for stage in job.method.stages() if stage.name == name)
        if stage.distil and job.method.distillation.on:
            _check_teacher(job, run)
        previous = run.net(names[number - 1]) if number and not stage.from_backbone else None
        run_stage(job, stage, run, f"{number + 1}/{len(names)} ", previous)


def run_stage(job: Job, stage: Stage, run: Run, place: str, previous: Path | None) -> None:
    """Run or continue one stage, and write its best model and its record into the run; raises as :func:`run_stages`.

    Args:
        job: whose method and data are fitted.
        stage: new.
        run: the run folder; :attr:`Run.dense` is the teacher.
        place: of the stage in the run, before its name in lines.
        previous: folder of the model to start from; None for the backbone.
    """
    method, data, spare = job.method, job.data, copy.deepcopy(stage)
    last = run.stage(stage.name) / "last.ckpt"
    mark = _marked(last, type(method).__name__, stage.name)[1] if last.is_file() else {}
    check_unchanged(run, data, mark)
    step = mark.get("step")
    known = (mark, *run.finished().values())
    use_threads(dense_site_params(job.dense), next((r["threads"] for r in known if r.get("threads")), None))
    run.at_hand = run.at_hand if previous else {}
    method.prepare(stage, job.seed, previous, lambda: run.dense, mark, run.load)
    start = time.time()
    run.stage(stage.name).mkdir(parents=True, exist_ok=True)
    title = f"{type(method).__name__} {place}{stage.name}"
    offset = sum(record["steps"] for record in run.finished().values())
    watches = FiniteSteps(), Checkpoints(run.stage(stage.name), job.every), EpochLines(title, offset)
    loggers = job.trainer.get("logger")
    if loggers in (None, True):
        loggers = Curves(run, stage.name, None if step is None else offset + step + 1)
    trainer = _trainer(job.trainer | {"logger": loggers}, run, stage, [*watches])
    if step is not None:
        note(f"{title}: continues at step {step}")
    try:
        trainer.fit(method, data, ckpt_path=last if mark else None)
    except SystemExit as stop:  # Lightning's answer to Ctrl-C, and to SIGTERM, with exit code 0
        if isinstance(stop, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from stop
        if trainer.interrupted:
            raise KeyboardInterrupt from stop
        raise
    except (MisconfigurationException, RuntimeError, ValueError) as error:  # that only a fit can find
        if isinstance(error, MisconfigurationException) or str(error).lstrip(" `").startswith(_WRONG):
            raise UserError(f"trainer: {error}") from error
        raise
    if trainer.global_step < method.stage.total_steps:
        note(f"{title}: stopped after step {trainer.global_step} of {method.stage.total_steps}")
    forget(trainer, method)
    split, data.trainer = data.split, None  # type: ignore[assignment]
    _finish_stage(spare, job, stage, run, trainer, split, time.time() - start)
    method.release()
    # all ranks wait here; Lightning does not look at a signal that came after the last step
    if trainer.strategy.reduce_boolean_decision(trainer.received_sigterm, all=False):
        raise SystemExit(128 + signal.SIGTERM)


def check_unchanged(run: Run, data: DataModule, mark: dict[str, Any]) -> None:
    """Refuse other data, or steps of other rows, than in the finished stages and the ``mark`` of the checkpoint.

    A step may be divided otherwise, except where losses of vectors compare the texts of a micro-batch.
    """
    records = (*run.finished().values(), mark)
    if other := next((r["version"] for r in records if r.get("version") not in (None, __version__)), None):
        note(f"lit_compress {other} began '{run.folder}', this is {__version__}")
    vectors = task_type(data.record).loss == "vectors"
    if mark and "split" not in mark:
        accumulated = run.recorded().get("trainer", {}).get("accumulate_grad_batches") or 1
        if accumulated > 1 or data.split[1:] != [1, 1]:
            raise UserError(
                f"ckpt_path: version 0.2 counted micro-batches in '{run.stage(mark['stage']) / 'last.ckpt'}', which is "
                "an exact place with one for a step on one device only; remove it to begin the stage again"
            )
    for was in (record.get("split") or data.split for record in records):
        if vectors and was != data.split:
            raise UserError(
                f"data.batch_size: the split of '{run.folder}' was {was}, now {data.split}; vectors are compared with "
                "the others of a micro-batch; give the same numbers"
            )
        if prod(was) != prod(data.split):
            raise UserError(
                f"data.batch_size: the global batch of '{run.folder}' was {prod(was)}, now {prod(data.split)} "
                "(batch_size, accumulate_grad_batches, devices); give the same product"
            )
    _check_rows(run, data, records)


def _check_rows(run: Run, data: DataModule, records: Iterable[dict[str, Any]]) -> None:
    """Refuse other rows than in finished stages or checkpoints, of which these are the ``records``."""
    for record in records:
        if record.get("data", now := data.fingerprint(record.get("split"))) != now:
            stage = record.get("name") or record["stage"]
            raise UserError(f"data.path: stage {stage} of '{run.folder}' had other data; give the same")


def _trainer(given: dict[str, Any], run: Run, stage: Stage, callbacks: list[Callback]) -> Trainer:
    """Build the Trainer of one stage from the user's arguments and the stage's own."""
    arguments = {name: value if name == "logger" else copy.deepcopy(value) for name, value in given.items()}
    if arguments.get("enable_progress_bar") is None:  # a file would get fragments of it
        arguments["enable_progress_bar"] = sys.stdout.isatty()
    if arguments["enable_progress_bar"]:
        callbacks.append(StageBar(refresh_rate=10))
    users = arguments.get("callbacks") or []
    arguments["callbacks"] = [*(users if isinstance(users, list) else [users]), *callbacks]
    return make_trainer(**arguments | {
        "max_epochs": stage.settings.epochs, "default_root_dir": run.stage(stage.name), "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": -1,  # a whole validation before training: the metric right after a factorization
    })  # fmt: skip


def _marked(path: Path, method: str, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint, and its step with the mark that ``Method.on_save_checkpoint`` of method and stage added."""
    checkpoint = read_checkpoint(path)
    mark: dict[str, Any] = checkpoint.get("lit_compress") or {}
    if (mark.get("method"), mark.get("stage")) != (method, stage):
        what = f"the checkpoint was not written by {method}, stage {stage}"
        raise UserError(f"ckpt_path: {what}; remove it to start the stage again")
    return checkpoint, mark | {"step": checkpoint["global_step"]}


@rank_zero_only
def _finish_stage(
    spare: Stage, job: Job, stage: Stage, run: Run, trainer: Trainer, split: list[int], seconds: float
) -> None:
    """Write the best model of a finished stage, and its record; ``spare`` is the stage as it was before the fit."""
    method, data, name = job.method, job.data, stage.name
    checkpoint, mark = _marked(run.stage(name) / "best.ckpt", type(method).__name__, name)
    if not mark["at_budget"]:
        rank_zero_warn(f"{name}: no epoch ended at the budget; the last is kept; train longer, e.g. {name}.epochs")
    if method.device_mesh is not None:  # other processes have parts of the model: it is built again
        previous, stage, method = stage.previous, spare, job.at().method
        method.prepare(stage, job.seed, previous, None, mark)
        method.configure_model()
        stage.set_total_steps(mark["total_steps"])
    stage.notes, net = mark.get("notes", {}), method.net
    method.load_state_dict(checkpoint["state_dict"])
    with atomic_folder(run.net(name)) as temporary:
        stage.deploy(net)
        stage.finish(net, temporary)
        write_net(small := fuse(net), data, temporary)
    run.hand_on(name, small, job.dense)
    best, offset = mark["step"], sum(record["steps"] for record in run.finished().values())
    log_stage(trainer.loggers, small, name, offset + mark["total_steps"], mark["metrics"], offset + best)
    scores = {"metric": mark["metrics"], "initial": mark["initial"]}
    if data.hold_out is not None:  # the best epoch was chosen on training rows: the dev set is new to the model
        scores = {"metric": evaluate(small, data), "initial": {}, "held_out": mark["metrics"]}
    elif isinstance(limit := trainer.limit_val_batches, int) or limit < 1:  # it was chosen on a part of the dev set
        scores = {"metric": evaluate(small, data), "initial": {}}
    elif not best and isinstance(stage, RoundedStage):  # it was validated with rounded weights
        scores["metric"] = evaluate(small, data)
    peak = peak_bytes(current_device())  # on an accelerator: PyTorch's there
    record = {
        "name": name, "last": name == method.stages()[-1].name, **scores, "steps": trainer.global_step,
        "best_step": best, "seconds": round(seconds, 1),
        "at_budget": mark["at_budget"], "threads": torch.get_num_threads(), "data": mark["data"], "split": split,
        "version": __version__, "peak_mib": round(peak_mib(), 1),
        **({} if peak is None else {"gpu_peak_mib": round(peak / 2**20, 1)}), **mark.get("notes", {}),
    }  # fmt: skip
    if name == "dense":
        record |= origin_of(method.backbone, method.teacher)
    if skipped := sum(callback.skipped for callback in trainer.callbacks if isinstance(callback, FiniteSteps)):  # type: ignore
        record["skipped"] = skipped
    run.finish(record)
    run.remove_checkpoints(name)


def _adopt_teacher(job: Job, run: Run) -> None:
    """Copy the given teacher into a new run as the model of the dense stage, and measure its dev metrics."""
    if "dense" in run.finished():
        return
    method, data = job.method, job.data
    net = load_finetuned(str(method.teacher), method.task)
    with atomic_folder(run.net("dense")) as temporary:
        write_net(net, data, temporary)
    record = {"name": "dense", "metric": (metric := evaluate(net, data)), "initial": metric, "steps": 0}
    record |= {"teacher": as_shown(str(method.teacher)), "data": data.fingerprint()}
    run.finish(record | origin_of(method.backbone, method.teacher))


def _check_teacher(job: Job, run: Run) -> None:
    """Warn of a teacher that is not clearly better than the best constant answer; refuse a given one that is worse."""
    method, name = job.method, job.data.record.metrics[0]
    score, floor = run.finished()["dense"]["metric"][f"val/{name}"], constant_answer(job.data)
    if not (finding := near_chance({"metric": {"name": name}, "dense": {"metric": score}, **floor})):
        return
    if not method.teacher:
        rank_zero_warn(f"model.dense: the teacher has hardly learned anything ({finding}); add --model.dense.epochs 10")
    elif score < floor["constant"] and method.distillation.alpha > 0:
        raise UserError(f"model.teacher: '{method.teacher}' has {finding}; are its labels in another order?")
    else:
        rank_zero_warn(f"model.teacher: '{method.teacher}' has {finding}; it can teach little")


def use_threads(weights: int, recorded: int | None = None) -> int:
    """Set the threads of this process and return their number: the run's so far, else one for a small model, else all.

    A number in the environment is kept. Sums are rounded in another order with another number of threads, so a
    continued run keeps its own.
    """
    if not any(name in os.environ for name in _GIVEN):
        torch.set_num_threads(recorded or (1 if weights < SMALL else torch.get_num_threads()))
    return torch.get_num_threads()
