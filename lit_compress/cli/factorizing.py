"""The command ``factorize``: compress a fine-tuned model without training, and export it."""

from __future__ import annotations

import copy
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lit_compress.calibration.walk import calibration_parts
from lit_compress.cli.by_block import check_choices, factorize_by_block
from lit_compress.cli.fitting import print_report, settle_budget, settled
from lit_compress.cli.options import CommandLine
from lit_compress.cli.recipes import merged_configs
from lit_compress.cli.words import Line
from lit_compress.evaluation.evaluate import divergence, evaluate
from lit_compress.evaluation.metrics import higher_is_better
from lit_compress.export.folder import check_out, check_owner, write_export
from lit_compress.methods import Method
from lit_compress.models.backbones import load_config, load_finetuned, resolve
from lit_compress.models.files import stamps
from lit_compress.models.sites import Model
from lit_compress.models.storage import load_net, save_net
from lit_compress.run.distilling import DISTIL, LOSSES, Distilling, Recovery
from lit_compress.run.finish import one_shot
from lit_compress.run.first import of_first
from lit_compress.run.folder import Run, begin_work, end_work, write_net
from lit_compress.run.guard import check_factorize
from lit_compress.run.job import Job
from lit_compress.run.settle import check_sizes
from lit_compress.stages.compression import CompressedStage, compress
from lit_compress.stages.refinement import check_refinement, refine_net
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, check_folder, read_json
from lit_compress.utils.memory import freed_memory_returned, return_freed_memory, trim
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import is_first

COMPRESSED = "compressed"  # the first stage of the run that --distil continues


def factorize(
    model: str, out: str, *, method: str | None = None, by_block: Literal["float32"] | None = None,
    refine: int | None = None, distil: int | None = None, distil_texts: str | None = None,
    distil_rate: float | None = None, line: Line,
) -> None:  # fmt: skip
    """Factorize a fine-tuned model at once, without training, and export it.

    Args:
        model: folder or hub name of a model fine-tuned on the task.
        out: folder to write, a full export.
        method: SecondOrder without it, or FWSVD, with a rank_ratio of 0.33 and uniform ranks, if the weighting is not
            kfac. Another one that compresses in one shot: LLMPruner (heads and neurons are removed by first-order
            scores, --model.prune.examples 10), SliceGPT (hidden states keep their first principal directions), SVD, or
            one of your own, mypackage.Mine.
        by_block: for a model larger than memory: one block at a time is in memory, states between blocks are on disk in
            float32 (in OUT.by_block); the same command continues after a kill.
        refine: train every compressed block for so many steps to give the dense block's outputs, without labels, on the
            calibration texts, e.g. 100. If the dev metric gets worse, the model before it is kept.
        distil: train the whole compressed model for so many steps to give the dense model's logits, e.g. 100; if it
            does not write text, also its hidden states. No labels are read. The best of its epochs and
            of the model before it is kept. With --dtype int4 the weights are rounded to 4 bits in every step.
            Options of the Trainer, of the distillation, and optimizer and lr_scheduler of the method's stage are as of
            fit. The same command continues after a kill.
        distil_texts: file of texts for --distil in place of the training texts.
        distil_rate: learning rate of --distil, default 0.0003.
        line: further options.
    """
    recovery = Recovery(refine, distil, distil_texts, distil_rate)
    report = run_factorize(model, out, line, recovery, by_block)
    if report is not None:
        print_report(report, Path(out), Path(f"{out}.distil"))


def run_factorize(
    model: str, out: str, line: Line, recovery: Recovery, by_block: Literal["float32"] | None = None
) -> dict[str, Any] | None:
    """Factorize as :func:`factorize`, and return the report; None on all processes but the first.

    With ``--distil`` the compressed model is written to the folder ``out``.distil, from which a stage of ``fit``
    continues. It holds checkpoints until the export is there, and then the curves alone.
    """
    if recovery.distil is None and (unread := next(filter(only_with_distil, line.names), None)):
        raise UserError(f"{unread}: factorize reads it with --distil only; leave it out")
    if not (merged_configs(line).get("data") or {}).get("task"):
        raise UserError("data.task: it is missing; name the task of the model, e.g. --data.task sst2, or --data.path")
    cli = CommandLine(replace(line, options=[*line.options, ("model.backbone", model)]))
    current_device()  # refuses one that is not here before anything is loaded
    place = Path(out).expanduser()
    check_out(place)
    check_owner(place)
    job = cli.ready() if recovery.distil is None else with_usual_losses(cli, cli.ready())
    backbone, path = cli.config.model.init_args.backbone, place / "report.json"
    config = read_json("factorize", path, dict).get("config") if path.is_file() else None
    known = config and config.get("model", {}).get("init_args", {}).get("backbone")
    if known and len({Path(name.partition("@")[0]).expanduser().resolve() for name in (known, backbone)}) > 1:
        raise UserError(f"out: '{place}' holds an export of '{known}'; give another folder, or remove it")
    if by_block:
        check_choices(job.choices, recovery)
        if (budget := job.method.budget) is not None and budget.kind == "speedup":
            raise UserError(f"--by_block: budget '{budget.asked}' is measured on the whole model; nearest: flops=0.5")
        job = settle_budget(cli)
        return factorize_by_block(place, job, one_shot_stage(job.method), cli.dump(), recovery)
    with ExitStack() as work:
        folder = place.with_name(f"{place.name}.distil")
        if recovery.distil is None:
            folder = Path(work.enter_context(tempfile.TemporaryDirectory()))
        else:
            check_folder("out", folder)
        job = settled(cli, run := Run(folder), partial(settle_budget, cli, run))
        report = _factorized(place, job, run, cli.dump(), recovery, work)
        if recovery.distil is not None and report is not None:
            end_work(folder)
    return report


def only_with_distil(option: str) -> bool:
    """Return whether ``factorize`` reads an option for ``--distil`` only."""
    trains = option.startswith(("trainer.", "model.distillation")) and option != "trainer.accelerator"
    trains |= option.split(".")[2:3] in (["optimizer"], ["lr_scheduler"]) and not option.startswith("model.dense")
    return trains or option in ("model.recompute", "checkpoint_every")


def with_usual_losses(cli: CommandLine, job: Job) -> Job:
    """Return the job with the usual losses of ``--distil``; values in a config or an option stay.

    Hidden states with other axes are left out. A language model learns the outputs alone, at a temperature of 1: at 2,
    and with hidden states, it ended worse (benchmarks/decoder). Its kind may be known only by the model's head.
    """
    losses, kind = cli.config.model.init_args.distillation, type(job.method)
    given = {*((merged_configs(cli.line)["model"].get("init_args") or {}).get("distillation") or ())}
    given |= {name.rpartition(".")[2] for name in cli.line.names if name.startswith("model.distillation.")}
    writes = job.data.record.kind == "language_modelling" and not ("alpha" in given and losses.alpha == 0)
    states = not writes or {"mask_padding", "relative"} & given
    if "alpha_layers" in given:
        states = losses.alpha_layers > 0
    usual = LOSSES
    if not states or not getattr(kind, "dense_states", True):  # options on states keep the method's own values
        usual = replace(signature(kind).parameters["distillation"].default, alpha=1.0, alpha_layers=0.0)
    for name, value in asdict(replace(usual, temperature=1.0 if writes else usual.temperature)).items():
        if name not in given:
            losses[name] = value
    return cli.build()


def load_model(name: str, method: Method) -> Model:
    """Load a model that was fine-tuned on the method's task; refuse a run, and a compressed model."""
    return load_finetuned(name, method.task, "model")


def one_shot_stage(method: Method) -> CompressedStage:
    """Return the stage of a method that compresses in one shot; refuse one that has to train, and wrong sizes."""
    check_sizes(method)
    stage = method.stages()[-1]
    if not isinstance(stage, CompressedStage) or not stage.shrinks_first:
        name = type(method).__name__
        raise UserError(f"factorize: {name} has to train: fit --model {name}; nearest here: SecondOrder")
    return stage


def _factorized(
    out: Path, job: Job, run: Run, config: dict[str, Any], recovery: Recovery, work: ExitStack
) -> dict[str, Any] | None:
    """Compress the method's backbone in one shot, train it in ``run`` if that is asked for, export it to ``out``.

    Returns the report; None on all processes but the first. ``work`` keeps the folder of the run.
    """
    method, data, distils = job.method, job.data, recovery.distil is not None
    stage = one_shot_stage(method)
    compression = stage.compression
    learns = distils and recovery.texts is None and method.distillation.label_weight > 0
    data.reads_labels = compression.reads_labels(method.kind) or learns
    load_config(method.backbone, method.task, "model", trained=True)  # refuses a model of another task
    check_factorize(job, stage, distils)
    job.choices.check(job.dense)
    if recovery.refine is not None:
        check_refinement(job.dense, compression.dense_states, type(method).__name__)
    distilling = Distilling(job, recovery, run) if distils else None

    def begin() -> None:
        if distilling is not None:
            model = stamps(Path(resolve(method.backbone)))
            settings = short_hash(config, asdict(recovery), model, distilling.job.data.fingerprint())
            work.enter_context(begin_work("--distil", run.folder, settings))

    of_first("begin", begin, job.trainer)
    return_freed_memory()
    run.dense = dense = load_model(method.backbone, method)

    def keep() -> None:
        if COMPRESSED in run.finished():
            return
        small, facts = compress_and_refine(job, dense, recovery.refine)
        with atomic_folder(run.net(COMPRESSED)) as temporary:
            write_net(small, data, temporary)
        asked = method.budget
        run.begin(config, budget={"asked": asked.asked, "density": job.method.density} if asked else None)
        run.finish({"name": COMPRESSED, "steps": 0, "facts": facts})

    if distilling is None:
        net, facts = compress_and_refine(job, dense, recovery.refine)
    else:
        of_first(COMPRESSED, keep, job.trainer)
        distilling.fit(run.net(COMPRESSED))
        if not is_first():
            return None
        net, facts = run.load(run.net(DISTIL)), run.finished()[COMPRESSED]["facts"]
        facts |= {"distilled": distilling.told()}
    return_freed_memory()  # again: a training keeps it, as a call to the system for every tensor would take time
    trim()
    if calibration := facts["calibration"]:
        calibration["measured_loss"] = divergence(net, dense, data)
    trim()
    scores = facts.pop("dense")
    return write_export(out, one_shot(job, net, dense, scores, config, facts), job.choices)


def compress_and_refine(job: Job, dense: Model, refine: int | None) -> tuple[Model, dict[str, Any]]:
    """Return a compressed copy of ``dense``, the better one of those before and after ``refine`` steps of every block.

    Also fields of the report; ``dense`` has the scores of the dense model.
    """
    method, data, stage = job.method, job.data, one_shot_stage(job.method)
    scores, compression = evaluate(dense, data, sure=True), stage.compression
    stage.check(dense)
    stage.check_data(dense, data)
    with freed_memory_returned():  # not while blocks are trained
        net = compress(dense, compression, method.task, data, current_device(), keep=True)
    facts = {"dense": scores, "calibration": compression.record(data), "refined": None, "distilled": None}
    trim()
    if refine is None:
        return net, facts
    kind, name, chooses = task_type(data.record), data.record.metrics[0], copy.copy(data)
    chooses.choosing, before = True, evaluate(net, chooses)[f"val/{name}"]
    parts = calibration_parts(kind, stage.texts(data), None)
    with tempfile.TemporaryDirectory() as states:
        save_net(net, kept := Path(states) / "before")
        told = refine_net(dense, net, kind, parts, refine, Path(states), current_device(), compression.behind)
        trim()
        after = evaluate(net, chooses)[f"val/{name}"]
        worse = after < before if higher_is_better(data.record) else after > before
        if worse:
            rows = "dev" if data.hold_out is None else "held-out"
            moved = f"{rows} {name} went from {before:.4f} to {after:.4f}"
            note(f"--refine: {moved}: the model before it is kept; try --distil")
            net = load_net(kept)
    return net, facts | {"refined": told | {"metric": [before, after], "kept": not worse}}
