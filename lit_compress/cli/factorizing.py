"""The command ``factorize``: compress a fine-tuned model without training, and export it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.cli.by_block import factorize_by_block
from lit_compress.cli.exporting import print_choices
from lit_compress.cli.fitting import ended_by_sigterm, settle_budget, warn_missed
from lit_compress.cli.one_shot import factorize_model, finished_compression, load_model
from lit_compress.cli.options import CommandLine, method_class
from lit_compress.cli.recipes import inferred_task
from lit_compress.cli.words import Line
from lit_compress.export.folder import check_out
from lit_compress.export.table import print_table
from lit_compress.run.first import of_first
from lit_compress.run.trials import choose_removal
from lit_compress.stages.distil import LOSSES, Recovery
from lit_compress.stages.distillation import Distillation
from lit_compress.utils.devices import current_device
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import read_json
from lit_compress.utils.tables import print

if TYPE_CHECKING:
    from lit_compress.export.speed_asked import Programs
    from lit_compress.run.job import Job


def factorize(
    model: str, out: str, *, method: str | None = None, by_block: Literal["float32"] | None = None,
    refine: int | None = None, distil: int | None = None, distil_texts: str | None = None,
    distil_rate: float | None = None, line: Line,
) -> None:  # fmt: skip
    """Factorize a fine-tuned model at once, without training, and export it.

    Args:
        model: folder or hub name of a model fine-tuned on the task.
        out: folder to write, a full export.
        method: another method that compresses in one shot: LLMPruner (heads and neurons are removed by first-order
            scores, --model.prune.examples 10), SliceGPT (hidden states keep their first principal directions), SVD, or
            one of your own, mypackage.Mine.
        by_block: for a model larger than memory: one block at a time is in memory, states between blocks are on disk in
            float32 (in OUT.by_block); the same command continues after a kill.
        refine: train every compressed block for so many steps to give the dense block's outputs, without labels, on the
            calibration texts, e.g. 100. If the dev metric falls, the model before it is kept.
        distil: train the whole compressed model for so many steps to give the dense model's logits and hidden states,
            without labels, on the training texts, e.g. 100. The best of its epochs and of the model before it is kept.
            Options of the Trainer and of the distillation are as of fit. The same command continues after a kill.
        distil_texts: file of texts for --distil in place of the training texts.
        distil_rate: learning rate of --distil, default 0.0003.
        line: further options.
    """
    recovery = Recovery(refine, distil, distil_texts, distil_rate)
    with ended_by_sigterm("the same command continues"):
        report = run_factorize(model, out, line, recovery, by_block)
    if report is None:
        return
    print_table(report)
    if (loss := report["calibration"]) and loss["estimated_loss"] is not None:
        estimated, measured = (f"{loss[f'{name}_loss']:.2g}" for name in ("estimated", "measured"))
        print(f"added to the loss of an example: {estimated} estimated, {measured} measured on dev rows")
    if refined := report["refined"]:
        print(f"refined: {refined['steps']} steps of every block, {refined['texts']:,} texts")
    if distilled := report.get("distilled"):
        print(f"distilled: {distilled['steps']} steps of {distilled['batch']} texts")
    print_choices(report)
    warn_missed(report)
    print(f"ship this folder: {out}")
    if (curves := Path(f"{out}.distil")).is_dir():
        print(f"curves: tensorboard --logdir {curves}")


def run_factorize(
    model: str, out: str, line: Line, recovery: Recovery, by_block: Literal["float32"] | None = None
) -> dict[str, Any] | None:
    """Factorize a fine-tuned model, export it to ``out`` and return the report.

    Args:
        model: folder or name.
        out: folder to write.
        line: options of the model, the data and the export.
        recovery: how the compressed model is trained.
        by_block: precision of the states on disk; None: the whole model is in memory.

    Returns:
        The report; None on all processes but the first.

    Raises:
        UserError: an option, the model, the data or ``out`` cannot be used.
    """
    if recovery.distil is None and (unread := next(filter(only_with_distil, line.names), None)):
        raise UserError(f"{unread}: factorize reads it with --distil only; leave it out")
    if inferred_task(line) is None:
        raise UserError("data.task: it is missing; name the task of the model, e.g. --data.task sst2, or --data.path")
    usual = None if recovery.distil is None else usual_losses(line)
    cli = CommandLine(replace(line, values={**line.values, "model.backbone": model}), "factorize", usual=usual)
    current_device()  # refuses one that is not here before anything is loaded
    place = Path(out).expanduser()
    check_out(place)
    job = cli.ready()
    _check_same_model(place, cli.config.model.init_args.backbone)
    if by_block:
        if (budget := job.method.budget) is not None and budget.kind == "speedup":
            raise UserError(f"--by_block: budget '{budget.asked}' is measured on the whole model; nearest: flops=0.5")
        if job.method.kinds:
            raise UserError("--by_block: retrain.removes 'auto' needs the whole model in memory; nearest: structures")
        return factorize_by_block(place, settle_budget(cli), cli.dump(), recovery)
    job, chosen, timed = _sized(cli, place, job, recovery)
    return factorize_model(place, job, cli.dump(), recovery, chosen, timed)


def _check_same_model(out: Path, backbone: str) -> None:
    """Refuse to replace the export of another model."""
    path = out / "report.json"
    config = read_json("factorize", path, dict).get("config") if path.is_file() else None
    known = config and config.get("model", {}).get("init_args", {}).get("backbone")
    if known and Path(known).expanduser().resolve() != Path(backbone).expanduser().resolve():
        raise UserError(f"out: '{out}' holds an export of '{known}'; give another folder, or remove it")


def only_with_distil(option: str) -> bool:
    """Return whether ``factorize`` reads an option for ``--distil`` only."""
    trains = option.startswith(("trainer.", "model.distillation")) and option != "trainer.accelerator"
    return trains or option in ("model.recompute", "checkpoint_every", "max_skipped")


def usual_losses(line: Line) -> dict[str, Any]:
    """Return the config of the distillation, which all others override; of hidden states if these have dense axes."""
    dense_states = getattr(method_class(line.last("model")), "dense_states", True)
    none = str(line.last("model.distillation.alpha_layers")).strip("0.") == ""
    losses = LOSSES if dense_states and not none else Distillation(alpha=1.0)
    return {"model": {"init_args": {"distillation": asdict(losses)}}}


def _sized(cli: CommandLine, out: Path, job: Job, recovery: Recovery) -> tuple[Job, dict[str, Any], Programs | None]:
    """Settle the size of the export and the kind of removal; the first process decides, or finished work has.

    Returns:
        The job; ``density``, ``removes`` and the field ``tried`` of the report; the programs that were timed, if any.
    """
    budget, done = job.method.budget, finished_compression(out, recovery)
    decided: list[tuple[Job, Programs | None]] = []
    later = job.method.kinds and budget is not None and budget.kind == "speedup"

    def decide() -> dict[str, Any]:
        if done is not None:
            return dict(done["chosen"])
        sized, timed = settle_budget(cli, known=not later), None
        chosen = {"density": sized.method.given["density"] if budget else None, "removes": None, "tried": None}
        if sized.kinds:
            chosen, timed = choose_removal(load_model(job.method.backbone, job.method), sized)
        decided.append((sized.at(chosen["density"], chosen["removes"]), timed))
        return chosen

    chosen = decide() if recovery.distil is None else of_first("size", decide, job.trainer)
    if decided:
        return decided[0][0], chosen, decided[0][1]
    job = settle_budget(cli, known=False, density=chosen["density"])
    return job.at(chosen["density"], chosen["removes"]), chosen, None
