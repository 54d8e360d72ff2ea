"""The command without training: factorize and export a fine-tuned model."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.calibration.walk import calibration_parts
from lit_compress.evaluation.divergence import divergence
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.evaluation.metrics import higher_is_better
from lit_compress.export.card import license_of
from lit_compress.export.folder import Export, write_export
from lit_compress.export.report import Measured
from lit_compress.export.speed_asked import Programs
from lit_compress.methods import Method
from lit_compress.models.backbones import finetuned_config, load_finetuned, resolve
from lit_compress.models.shards import net_bytes
from lit_compress.models.storage import load_net, save_net
from lit_compress.run.distilling import DISTIL, Distilling
from lit_compress.run.first import is_first_process, of_first
from lit_compress.run.folder import LOCK, Run, write_net
from lit_compress.run.guard import check_factorize
from lit_compress.run.job import Job
from lit_compress.run.loggers import CURVES
from lit_compress.run.settle import check_sizes
from lit_compress.run.solve import check_choices
from lit_compress.stages.compression import CompressedStage, compress
from lit_compress.stages.distil import Recovery
from lit_compress.stages.refinement import check_refinement, refine_net
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, read_json, remove, write_json
from lit_compress.utils.memory import freed_memory_returned, trim
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


COMPRESSED = "compressed"  # the first stage of the run that --distil continues


def load_model(name: str, method: Method) -> PreTrainedModel:
    """Load a model that was fine-tuned on the method's task.

    Raises:
        UserError: ``name`` is a run, or the model is compressed already or not fine-tuned on the task.
    """
    return load_finetuned(name, method.task, "model", method.sites)


def one_shot_stage(method: Method) -> CompressedStage:
    """Return the stage of a method that compresses in one shot.

    Raises:
        UserError: the method has none.
    """
    stage = method.stages()[-1]
    if not isinstance(stage, CompressedStage) or not stage.shrinks_first:
        raise UserError(
            f"factorize: {type(method).__name__} has to train: fit --model {type(method).__name__}; nearest here: "
            "SecondOrder"
        )
    return stage


def factorize_model(
    out: Path, job: Job, config: dict[str, Any], recovery: Recovery, chosen: dict[str, Any], timed: Programs | None
) -> dict[str, Any] | None:
    """Compress the method's backbone in one shot, export it to ``out`` and return the report.

    With ``recovery.distil`` the compressed model is written to the folder ``out``.distil, from which a stage of ``fit``
    continues. It holds checkpoints until the export is there, and then the curves alone.

    Args:
        out: folder to write.
        job: its method says how the backbone is compressed; the report is on its validation data.
        config: of the command.
        recovery: how the compressed model is trained.
        chosen: as :func:`~lit_compress.run.trials.choose_removal`.
        timed: as :class:`Export`.

    Returns:
        The report; None on all processes but the first.

    Raises:
        UserError: the model, the data or ``out`` cannot be used.
    """
    method, data, choices = job.method, job.data, job.choices
    check_sizes(method)
    stage, name = one_shot_stage(method), type(method).__name__
    learns = recovery.distil is not None and recovery.texts is None and method.distillation.label_weight > 0
    data.reads_labels = stage.compression.reads_labels(method.kind) or learns
    finetuned_config(method.backbone, method.task, "model")  # refuses a model of another task
    check_factorize(job, stage, recovery.distil is not None)
    with freed_memory_returned():
        dense = load_model(method.backbone, method)
    check_choices(choices, method, dense)
    if recovery.refine is not None:
        check_refinement(dense, stage.compression.dense_states, name)
    compress = partial(compress_and_refine, stage, method, dense, data, recovery.refine)
    with ExitStack() as work:
        if recovery.distil is None:
            net, facts = compress()
        else:
            run = _work_of(out)
            distilling = Distilling(job, recovery, run)
            settings = short_hash(config, asdict(recovery), distilling.texts.fingerprint())
            keep = partial(_keep_compressed, run, work, settings, data, chosen, compress)
            of_first(COMPRESSED, keep, job.trainer)
            distilling.fit(dense, run.net(COMPRESSED), config["checkpoint_every"], config["max_skipped"])
            if not is_first_process():
                return None
            net, facts = load_net(run.net(DISTIL)), run.finished()[COMPRESSED]["facts"]
            facts["distilled"] = distilling.told()
        trim()
        if made := facts["calibration"]:
            made["measured_loss"] = divergence(net, dense, data)
        trim()
        size = net_bytes(Path(resolve(method.backbone, method.task)))
        before = {"dense": Measured.by(facts.pop("dense"), dense, size, data.record)}
        budget = (method.budget, method.density) if method.budget else None
        more: dict[str, Any] = facts | {"license": license_of(method.backbone)}
        more |= {"tried": chosen["tried"]} if chosen["tried"] else {}
        source = Export(net, before, name, data, config, more=more, budget=budget, timed=timed)
        report = write_export(out, source, choices)
    if recovery.distil is not None:
        _keep_curves(run.folder)
    return report


def _keep_compressed(
    run: Run, work: ExitStack, settings: str, data: DataModule, chosen: dict[str, Any],
    compress: Callable[[], tuple[PreTrainedModel, dict[str, Any]]],
) -> None:  # fmt: skip
    """Write the compressed model and the facts about it as the first stage of ``run``, unless they are there."""
    begin_work("--distil", run.folder, settings)
    work.enter_context(run.claim())
    if COMPRESSED in run.finished():
        return
    net, facts = compress()
    with atomic_folder(run.net(COMPRESSED)) as temporary:
        write_net(net, data, temporary)
    run.finish({"name": COMPRESSED, "steps": 0, "facts": facts, "chosen": chosen})


def _work_of(out: Path) -> Run:
    return Run(out.with_name(f"{out.name}.distil"))


def finished_compression(out: Path, recovery: Recovery) -> dict[str, Any] | None:
    """Return the record of the compressed model that ``--distil`` continues from; None if there is none."""
    return None if recovery.distil is None else _work_of(out).finished().get(COMPRESSED)


def compress_and_refine(
    stage: CompressedStage, method: Method, dense: PreTrainedModel, data: DataModule, refine: int | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a compressed copy of ``dense``, and fields of the report; ``dense`` has the scores of the dense model."""
    scores = evaluate(dense, data, sure=True)
    stage.compression.check(dense)
    stage.check_data(dense, data)
    with freed_memory_returned():  # in a training, a call to the system for every tensor would take half of the time
        compression = stage.compression
        compression.folder = Path(method.backbone).expanduser()
        net, loss = compress(dense, compression, method.task, data, current_device(), keep=True)
    made = compression.record(data, loss)
    trim()
    refined = None
    if refine is not None:
        net, refined = _refined(dense, net, stage, data, refine)
    return net, {"dense": scores, "calibration": made, "refined": refined, "distilled": None}


def _refined(
    dense: PreTrainedModel, net: PreTrainedModel, stage: CompressedStage, data: DataModule, steps: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the better of ``net`` and the refined ``net``, and the report's entry."""
    kind, name, chooses = task_type(data.record), data.record.metrics[0], copy.copy(data)
    chooses.choosing, scores = True, [evaluate(net, chooses)[f"val/{name}"]]
    parts = calibration_parts(kind, stage.texts(data), None)
    with tempfile.TemporaryDirectory() as states:
        save_net(net, before := Path(states) / "before")
        told = refine_net(dense, net, kind, parts, steps, Path(states), current_device(), stage.compression.behind)
        trim()
        scores.append(evaluate(net, chooses)[f"val/{name}"])
        worse = scores[1] < scores[0] if higher_is_better(data.record) else scores[1] > scores[0]
        if worse:
            note(
                f"--refine: dev {name} fell from {scores[0]:.4f} to {scores[1]:.4f}: the model before it is kept; try "
                "--distil"
            )
            net = load_net(before)
    return net, told | {"metric": scores, "kept": not worse}


def begin_work(option: str, folder: Path, settings: str) -> None:
    """Make the folder of unfinished work, or continue in it.

    Args:
        option: that needs the folder.
        folder: of the work.
        settings: hash of everything that the work depends on.

    Raises:
        UserError: it holds something else.
    """
    path = folder / "settings.json"
    begun = any(
        other.is_file() and other.relative_to(folder).parts[0] not in (path.name, CURVES, LOCK)
        for other in folder.rglob("*")
    )
    if begun and path.is_file() and read_json(option, path, dict).get("hash") != settings:
        raise UserError(
            f"{option}: '{folder}' holds unfinished work of other settings or data; give the same, or remove it"
        )
    if begun and not path.is_file():
        raise UserError(f"{option}: '{folder}' holds something else; give another OUT")
    if not begun:
        remove(folder / CURVES)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"hash": settings})


def _keep_curves(folder: Path) -> None:
    """Remove everything but the curves of finished work."""
    for path in folder.iterdir():
        if path.name != CURVES:
            remove(path)
    if not any(folder.iterdir()):
        folder.rmdir()
