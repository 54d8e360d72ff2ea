"""Running the stages of a method one after another, each with a new Trainer; continuing a run that was stopped.

Every stage reads files (the model of the stage before) and writes files, so that a run that is continued in
another process ends exactly as an uninterrupted one, on one device, under DDP and under FSDP2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lit_compress.evaluation.evaluate import constant_answer, evaluate
from lit_compress.export.card import origin_of
from lit_compress.export.folder import read_task
from lit_compress.export.fuse import compact
from lit_compress.export.report import reading_length
from lit_compress.export.runtimes import peak_mib
from lit_compress.methods.base import Method
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.backbones import empty_net, load_config, load_finetuned, load_tokenizer, resolve
from lit_compress.models.checks import refuse_compressed
from lit_compress.models.foreign import check_weights
from lit_compress.models.shapes import without_values
from lit_compress.models.sites import find_sites
from lit_compress.run.callbacks import Checkpoints, EpochLines, FiniteSteps, StageBar, shows_bar
from lit_compress.run.changes import OtherData, check_unchanged, other_length
from lit_compress.run.clean import remove_checkpoints
from lit_compress.run.folder import Run, is_first_process, write_net
from lit_compress.run.loggers import log_stage, stage_loggers
from lit_compress.run.plan import RunPlan, StagePlan, budget_plan, target_density
from lit_compress.run.solve import Outline, Storage, check_choices, outline
from lit_compress.run.threads import use_threads
from lit_compress.run.trainer import check_trainer, forget, make_trainer, processes, read_checkpoint, stage_steps
from lit_compress.stages.base import Stage
from lit_compress.stages.lora import merge_updates
from lit_compress.stages.mark import check_mark
from lit_compress.utils.devices import current_device, peak_bytes
from lit_compress.utils.errors import UserError, as_shown
from lit_compress.utils.files import atomic_folder
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import several
from lit_compress.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lit_compress.data.datamodule import DataModule


@dataclass
class Components:
    """Method, data, Trainer arguments and form of the export, which the command line builds again for every stage."""

    method: Method
    data: DataModule
    trainer: dict[str, Any]
    seed: int
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        self.data.accumulate = self.trainer.get("accumulate_grad_batches") or 1


def check_sizes(method: Method) -> None:
    """Refuse ``round_to`` for methods that choose no sizes, and invalid numbers; one shape for all layers likewise.

    Raises:
        UserError: see above.
    """
    name, step = type(method).__name__, method.round_to
    if step is not None and step < 1:
        raise UserError(f"model.round_to: {step} is below 1, the smallest valid value; usual: 8")
    if step is not None and all(stage.round_to is None for stage in method.stages()):
        raise UserError(f"model.round_to: {name} chooses no ranks or widths, only weights or rows; leave it out")
    if method.shape == "uniform" and not any(stage.uniform for stage in method.stages()):
        raise UserError(
            f"model.shape: 'uniform' is for heads and neurons that go at once, which {name} does not; "
            "nearest: LLMPruner, or SecondOrder with model.retrain.removes structures"
        )


def check_stages(parts: Components) -> RunPlan:
    """Check data, architecture, ranks and schedules of all stages before the first one starts.

    Returns:
        The plan.

    Raises:
        UserError: the first setting that cannot work.
    """
    method, data, trainer = parts.method, parts.data, parts.trainer
    net = shapes_of(method)
    find_sites(net)
    check_choices(parts.storage.choices, method, net)
    if method.teacher:
        _check_given_teacher(method, net.config)
    check_trainer(trainer, {stage.name: stage.settings.epochs for stage in method.stages()})
    data.devices = processes(trainer)
    data.prepare_data()
    planned = []
    check_sizes(method)
    for stage in method.stages():
        stage.check(net)
        stage.check_data(data.train_size())
        steps = stage_steps(stage, data, trainer)
        stage.set_total_steps(steps)
        planned.append(StagePlan(stage.name, stage.settings.epochs, steps))
    sites, total = dense_site_params(net), sum(weight.numel() for weight in net.parameters())
    density = target_density(method, net)
    of = method.rule.counted if method.rule else "sites"
    asked = budget_plan(method.budget, method.density, outline_of(parts)) if method.budget else None
    return RunPlan(type(method).__name__, tuple(planned), sites, total, density, method.stores_zeros, of, asked)


def shapes_of(method: Method) -> PreTrainedModel:
    """Return the dense model of ``method`` without values.

    Raises:
        UserError: the backbone is compressed already, or cannot be read.
    """
    refuse_compressed(f"model.backbone: '{method.backbone}'", Path(method.backbone).expanduser())
    check_weights(f"model.backbone: '{method.backbone}'", Path(resolve(method.backbone, method.task)))
    config = load_config(method.backbone, method.task, sites=method.sites)
    return without_values(lambda: empty_net(config))


def outline_of(parts: Components) -> Outline:
    """Return the sizes of the model that a run will export, as far as they are known before it."""
    net = shapes_of(parts.method)
    return outline(parts.method, net, reading_length(net, read_task(parts.data)), parts.storage)


def _check_given_teacher(method: Method, config: PreTrainedConfig) -> None:
    """Refuse a teacher that is compressed, that reads other tokens, or whose hidden states have another width.

    Raises:
        UserError: its tokenizer or width differs from the backbone's.
    """
    refuse_compressed(f"model.teacher: '{method.teacher}'", Path(str(method.teacher)).expanduser())
    place = resolve(str(method.teacher), method.task, "model.teacher")
    check_weights(f"model.teacher: '{method.teacher}'", Path(place))
    teacher = load_config(str(method.teacher), method.task, "model.teacher")
    vectors = method.kind.loss == "vectors"
    if (vectors or method.distillation.alpha_layers > 0) and teacher.hidden_size != config.hidden_size:
        raise UserError(
            f"model.teacher: '{method.teacher}' is {teacher.hidden_size} wide, the backbone {config.hidden_size}; give "
            f"a teacher of the same width{'' if vectors else ', or distillation.alpha_layers 0'}"
        )
    named = {"model.teacher": str(method.teacher), "model.backbone": method.backbone}
    vocabularies = [load_tokenizer(name, method.task, option).get_vocab() for option, name in named.items()]
    if vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"model.teacher: '{method.teacher}' has another tokenizer than the backbone ({len(vocabularies[0])} and "
            f"{len(vocabularies[1])} tokens); give a teacher made from model.backbone"
        )


def run_stages(
    build: Callable[[], Components], run: Run, ckpt_path: str | None, every: int, skips: int, changed: bool = False,
    decide: Callable[[Path], None] = lambda dense: None,
) -> None:  # fmt: skip
    """Run every unfinished stage of the method.

    Args:
        build: function that builds new components.
        run: the run folder, with its config.
        ckpt_path: ``last`` or a checkpoint file to continue from; None starts the first stage.
        every: optimizer steps between two checkpoints.
        skips: optimizer steps in a row without finite gradients at which the run stops.
        changed: continue with other data, of another length, or with another version; write it down.
        decide: is called with the folder of the dense model before the stages after it are built.

    Raises:
        UserError: a checkpoint is corrupt, or belongs to another run; or a stage does not compute finite gradients.
    """
    parts = build()
    devices = parts.data.devices = processes(parts.trainer)
    stages = parts.method.stages()
    if parts.method.teacher and "dense" not in run.finished():
        _adopt_teacher(parts, run)
        parts = build()
    names = ["dense", *(s.name for s in stages)] if parts.method.teacher else [s.name for s in stages]
    config = load_config(parts.method.backbone, parts.method.task, sites=parts.method.sites)
    weights = dense_site_params(without_values(lambda: empty_net(config)))
    for number, name in enumerate(names):
        if name in run.finished() or name not in [s.name for s in stages]:
            continue
        if "dense" in run.finished():
            decide(run.net("dense"))
        parts = build()
        parts.data.devices = devices
        stage = next(s for s in parts.method.stages() if s.name == name)
        if stage.distil and parts.method.distillation.on:
            _check_teacher(parts, run)
        previous = run.net(names[number - 1]) if number and not stage.from_backbone else None
        checkpoint, mark = _find_checkpoint(run, parts.method, stage, ckpt_path)
        changes = check_unchanged(run, parts.data, mark, changed)
        if changed and mark:
            changes += other_length(stage, parts.data, parts.trainer, mark)
            told = {"steps": "number of steps", "global batch": "global batch", "split": "split"}
            if again := next((told[change["what"]] for change in changes if change["what"] in told), None):
                checkpoint, mark = None, {}
                note(f"{name}: begins again, as its {again} has changed")
        if changes and is_first_process():
            run.keep_changes(changes, name)
        structure, step, stage.notes = mark.get("structure"), mark.get("step"), mark.get("notes", {})
        use_threads(weights, mark.get("threads") or next((r.get("threads") for r in run.finished().values()), None))
        parts.method.prepare(stage, parts.seed, previous, run.net("dense") if name != "dense" else None, structure)
        start = time.time()
        if is_first_process():  # the others can be ahead of its check that the run folder is new
            run.stage(name).mkdir(parents=True, exist_ok=True)
        title = f"{type(parts.method).__name__} {number + 1}/{len(names)} {name}"
        watches = FiniteSteps(skips), Checkpoints(run.stage(name), every), EpochLines(title, stage)
        own = [*watches, *[OtherData()] * changed]
        trainer = _trainer(parts, run, stage, title, step, own)
        if step is not None:
            note(f"{title}: continues at step {step}")
        try:
            trainer.fit(parts.method, parts.data, ckpt_path=checkpoint)
        except SIGTERMException:
            raise
        except SystemExit as stop:  # Lightning's answer to Ctrl-C
            raise (KeyboardInterrupt if trainer.interrupted else stop) from stop
        forget(trainer, parts.method)
        _finish_stage(build(), stage.name, previous, run, trainer, time.time() - start)
        barrier()


def _trainer(
    parts: Components, run: Run, stage: Stage, title: str, step: int | None, callbacks: list[Callback]
) -> Trainer:
    """Build the Trainer of one stage from the user's arguments and the stage's own.

    ``step`` is the stage's at which it continues; None if it starts.
    """
    offset = sum(record["steps"] for record in run.finished().values())
    arguments = dict(parts.trainer)
    arguments["enable_progress_bar"] = shows_bar(arguments.get("enable_progress_bar"))
    if arguments["enable_progress_bar"]:
        callbacks.append(StageBar(title))
    arguments["logger"] = stage_loggers(arguments.get("logger"), run, stage.name, offset, step)
    given = arguments.get("callbacks") or []
    arguments["callbacks"] = [*(given if isinstance(given, list) else [given]), *callbacks]
    own = {
        "max_epochs": stage.settings.epochs,
        "default_root_dir": run.stage(stage.name),
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": -1,  # a whole validation before training: the metric right after a factorization
    }
    return make_trainer(**arguments | own)


def _find_checkpoint(
    run: Run, method: Method, stage: Stage, ckpt_path: str | None
) -> tuple[Path | None, dict[str, Any]]:
    """Return the checked checkpoint from which ``stage`` continues, with its mark and its ``step``; None to start it.

    Raises:
        UserError: the checkpoint is missing, corrupt, or of another run, method or stage.
    """
    if ckpt_path is None:
        return None, {}
    path = run.stage(stage.name) / "last.ckpt"
    if ckpt_path != "last":
        given = Path(ckpt_path).expanduser().resolve()
        if not given.is_file():
            raise UserError(f"ckpt_path: no file '{ckpt_path}'; give `last`, or a last.ckpt of this run folder")
        if given.parent != run.stage(stage.name):
            mark = read_checkpoint(given).get("lit_compress") or {}
            if not mark or given.parent.parent != run.folder:
                raise UserError(f"ckpt_path: '{ckpt_path}' is not a checkpoint of this run; give `last`")
            return None, {}  # of a stage that is finished already
        path = given
    path, saved = _newest(path) if ckpt_path == "last" else (path, read_checkpoint(path))
    if saved is None:
        return None, {}
    return path, check_mark(saved, type(method).__name__, stage.name) | {"step": saved["global_step"]}


def _newest(last: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the newest checkpoint of a stage that can be read, with its content; None without one.

    Raises:
        UserError: neither of two can be read.
    """
    before = last.with_name("previous.ckpt")
    if not last.is_file():  # killed between the renames of the two
        return before, read_checkpoint(before) if before.is_file() else None
    try:
        return last, read_checkpoint(last)
    except UserError:
        if not before.is_file():
            raise
        checkpoint = read_checkpoint(before)
        rank_zero_warn(
            f"ckpt_path: '{last}' is damaged; the run continues from the one before, step {checkpoint['global_step']}"
        )
        return before, checkpoint


@rank_zero_only
def _finish_stage(
    parts: Components, name: str, previous: Path | None, run: Run, trainer: Trainer, seconds: float
) -> None:
    """Write the best model of a finished stage, files for the next stage, and the stage's record."""
    checkpoint = read_checkpoint(run.stage(name) / "best.ckpt")
    mark = check_mark(checkpoint, type(parts.method).__name__, name)
    if not mark["at_budget"]:
        rank_zero_warn(f"{name}: no epoch ended at the budget; the last is kept; train longer, e.g. {name}.epochs")
    stage = next(s for s in parts.method.stages() if s.name == name)
    stage.notes = mark.get("notes", {})
    parts.method.prepare(stage, parts.seed, previous, None, mark["structure"])
    parts.method.configure_model()
    parts.method.rename_gates(checkpoint["state_dict"])
    parts.method.load_state_dict(checkpoint["state_dict"])
    net = parts.method.net
    stage.set_total_steps(mark["total_steps"])
    with atomic_folder(run.net(name)) as temporary:
        stage.deploy(merge_updates(net))
        stage.finish(net, temporary)
        write_net(small := compact(net), parts.data, temporary)
    best = checkpoint["global_step"]
    log_stage(trainer.loggers, small, name, mark["total_steps"], mark["metrics"], best)
    scores = {"metric": mark["metrics"], "initial": mark["initial"]}
    if parts.data.hold_out is not None:  # the best epoch was chosen on training rows: the dev set is new to the model
        scores = {"metric": evaluate(small, parts.data), "initial": {}, "held_out": mark["metrics"]}
    record = {
        "name": name, **scores, "steps": trainer.global_step,
        "best_step": best, "seconds": round(seconds, 1), "at_budget": mark["at_budget"],
        "threads": torch.get_num_threads(), "data": mark["data"], "split": trainer.datamodule.split,  # type: ignore[attr-defined]
        "version": __version__, **_memory(),
        **mark.get("notes", {}),
    }  # fmt: skip
    if name == "dense":
        record |= origin_of(parts.method.backbone, parts.method.teacher, parts.method.task)
    if skipped := sum(callback.skipped for callback in trainer.callbacks if isinstance(callback, FiniteSteps)):  # type: ignore
        record["skipped"] = skipped
    run.finish(record)
    remove_checkpoints(run, name)


def _memory() -> dict[str, float]:
    """Return the most memory that this process has had so far, in MiB; on an accelerator also PyTorch's there."""
    peak = peak_bytes(current_device())
    gpu = {} if peak is None else {"gpu_peak_mib": round(peak / 2**20, 1)}
    return {"peak_mib": round(peak_mib(), 1), **gpu}


def _adopt_teacher(parts: Components, run: Run) -> None:
    """Copy the given teacher into the run as the model of the dense stage, and measure its dev metrics."""
    if not is_first_process():
        while "dense" not in run.finished():  # no process group yet to wait in
            time.sleep(0.2)
        return
    method = parts.method
    net = load_finetuned(str(method.teacher), method.task, sites=method.sites)
    with atomic_folder(run.net("dense")) as temporary:
        write_net(net, parts.data, temporary)
    metric = evaluate(net, parts.data)
    run.finish(
        {
            "name": "dense", "metric": metric, "initial": metric, "steps": 0, "teacher": as_shown(str(method.teacher)),
            "data": parts.data.fingerprint(), **origin_of(method.backbone, method.teacher, method.task),
        }
    )  # fmt: skip


def _check_teacher(parts: Components, run: Run) -> None:
    """Compare the teacher's dev metric with the best constant answer's; warn if it is not clearly better.

    Raises:
        UserError: a given teacher is worse than a constant answer; its labels may be in another order.
    """
    method, name = parts.method, parts.data.record.metrics[0]
    score, floor = run.finished()["dense"]["metric"][f"val/{name}"], constant_answer(parts.data)
    if not (finding := floor.near(name, score)):
        return
    if not method.teacher:
        rank_zero_warn(f"model.dense: the teacher has hardly learned anything ({finding}); add --model.dense.epochs 10")
    elif score < floor.score and method.distillation.alpha > 0:
        raise UserError(f"model.teacher: '{method.teacher}' has {finding}; are its labels in another order?")
    else:
        rank_zero_warn(f"model.teacher: '{method.teacher}' has {finding}; it can teach little")


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if several():
        torch.distributed.barrier()
