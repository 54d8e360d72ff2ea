"""``fit``, and what it shares with other commands: budgets, the choice of the teacher, the output."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.cli.options import CommandLine
from lit_compress.cli.words import Line
from lit_compress.evaluation.intervals import near_chance, standard_error
from lit_compress.export.choices import Choices
from lit_compress.export.speed_asked import find_place
from lit_compress.export.table import choice_lines, print_table
from lit_compress.export.vocabulary import tokens_kept
from lit_compress.models.backbones import finetuned_on, load_tokenizer, resolve
from lit_compress.models.budget import budget_line
from lit_compress.models.files import stored_dtype
from lit_compress.run.finish import export_run
from lit_compress.run.first import of_first
from lit_compress.run.folder import CURVES, Run
from lit_compress.run.guard import check_fit
from lit_compress.run.job import Job
from lit_compress.run.loggers import log_report
from lit_compress.run.runner import run_stages
from lit_compress.run.settle import check_stages
from lit_compress.run.solve import solve
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import check_folder, link_if_equal
from lit_compress.utils.progress import note
from lit_compress.utils.tables import print

LEAST_SHARE = 0.99  # of a metric without a standard error, below which it counts as lost


def run_fit(line: Line) -> tuple[Run, dict[str, Any] | None]:
    """Run or continue all stages of a method, and export the model.

    Returns:
        The run, and its report; None for the report on all processes but the first.

    Raises:
        UserError: an option, the data, the backbone or the run folder cannot be used.
    """
    cli = CommandLine(line)
    run = run_of(cli)
    with ExitStack() as claim:
        job = settled(cli, run, partial(_prepare, cli, run, claim))
        run_stages(job, run)
        return run, _report(run, job)


def settled(cli: CommandLine, run: Run, prepare: Callable[[], Job]) -> Job:
    """Return on every process the job that ``prepare`` settles, which the first one alone calls.

    Commits of names, the teacher and the density of the other processes are the first one's.
    """
    made = list[Job]()

    def settle() -> dict[str, Any]:
        made.append(prepare())
        budgeted = made[0].method.budget is not None
        return {"config": cli.dump(), "density": made[0].method.given["density"] if budgeted else None}

    told = of_first("run", settle, cli.build().trainer)
    if made:
        return made[0]
    _as_stored(cli, told["config"])
    return settle_budget(cli, run, told["density"])


def run_of(cli: CommandLine) -> Run:
    """Return the run folder that is asked for, or the usual one."""
    name = cli.config.model.class_path.rpartition(".")[2].lower()
    return Run(cli.config.run_dir or f"runs/{name}-{cli.config.data.task}")


def _prepare(cli: CommandLine, run: Run, claim: ExitStack) -> Job:
    """Settle everything about a run and begin it, or check that it may be continued; ``claim`` keeps the folder."""
    choose_teacher(cli, run)
    job = settle_budget(cli, run)
    config, asked = cli.dump(), job.method.budget
    if run.started:
        run.check_same(config)
        if cli.config.ckpt_path is None:
            raise UserError(
                f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir"
            )
        claim.enter_context(run.claim())
    else:
        check_folder("run_dir", run.folder)
        if run.foreign:
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        facts = check_stages(job)
        check_fit(job)
        claim.enter_context(run.claim())
        run.begin(config, facts, {"asked": asked.asked, "density": job.method.density} if asked else None)
    return job


def settle_budget(cli: CommandLine, run: Run | None = None, density: float | None = None) -> Job:
    """Return the job at the density that meets the budget, if there is one; a run that is continued keeps its own.

    The export gets the dtype of the model, or the program of the runtime in which a speed-up is measured.

    Args:
        cli: makes the job.
        run: that may be continued; None for a command that makes none.
        density: that the first process found; None: it is not known.
    """
    run = run if run is not None and run.started else None
    job, choices = cli.build(), cli.config.export
    method, budget = job.method, job.method.budget
    if choices.dtype == "auto" and run is not None:
        stored = run.config()["export"]
        choices.dtype = stored["dtype"]
        if budget is not None and budget.kind == "speedup":  # it chose the program, and so the format
            choices.format = stored["format"]
    elif choices.dtype == "auto" and (choices.format != "hf" or (budget is not None and budget.kind == "speedup")):
        choices.dtype = "float32"
    elif choices.dtype == "auto":
        option = "model.teacher" if method.teacher not in (None, method.backbone) else "model.backbone"
        choices.dtype = stored_dtype(Path(resolve(method.teacher or method.backbone, option)))
    job = replace(job, choices=Choices(**choices.as_dict()))
    if job.choices.vocabulary == "data" and (run is None or budget is not None):
        job = job.at(tokens=tokens_kept(job.dense, job.data))
    if budget is None:
        return job
    if budget.kind == "speedup":
        place = find_place(budget, job.choices, job.dense, job.length)
        where = "one thread" if place.device == "cpu" else "bfloat16"
        note(f"budget {budget.asked}: measured in {place}, {where}")
        choices.format, choices.dtype = place.choices.format, place.choices.dtype
        job = job.at(choices=place.choices)
    if density is None and run is not None:
        density = run.density(budget.asked)
    return job.at(solve(job) if density is None else density)


def choose_teacher(cli: CommandLine, run: Run) -> None:
    """Choose the teacher if none is given: of a run that is continued its own, else maybe the backbone; resolve names.

    A backbone that is fine-tuned on the labels of the data, or whose vectors are the labels, is the teacher, so that no
    dense stage is trained, unless options of the dense stage were given.
    """
    init = cli.config.model.init_args
    if run.started:
        return _as_stored(cli, run.config())
    job = cli.ready()
    dense, task = [name for name in cli.line.names if name.startswith("model.dense")], job.data.record
    asked = dense or any(name.startswith("model.teacher") for name in cli.line.names)
    if init.get("teacher") and dense:
        note(f"{dense[0]}: not used, since model.teacher is given; no dense stage is trained")
    if init.get("teacher") or not finetuned_on(job.method.backbone, task) or asked:
        return
    cli.backbone_as_teacher()
    text = "is the teacher: the model learns its vectors"
    if task.labels:
        text = f"is fine-tuned on these labels ({', '.join(task.labels)}): it is the teacher; "
        text += "--model.dense.epochs 3 would fine-tune it first"
    note(f"model.backbone: '{init.backbone}' {text}")


def _as_stored(cli: CommandLine, config: dict[str, Any]) -> None:
    """Take the teacher of a run, and its values where an earlier version had other defaults."""
    init, stored = cli.config.model.init_args, config["model"]["init_args"]
    for name, settings in stored.items():
        if isinstance(settings, dict) and settings.get("removes") and "removes" in (init.get(name) or {}):
            init[name].removes = init[name].removes or settings["removes"]
    init.teacher = init.get("teacher") or stored.get("teacher")
    cli.ready(config)


@rank_zero_only
def _report(run: Run, job: Job) -> dict[str, Any]:
    """Export the model, write the report and log it; return what is there already."""
    out = run.folder / "export"
    if (out / "report.json").is_file() and (known := run.read("report.json", dict)) is not None:
        return known
    dense = str(run.net("dense"))  # whose tokenizer a later export reads
    data = job.data.read_by(load_tokenizer(dense, job.data.record))
    data.backbone = dense
    report = export_run(run, out, data, job.choices)
    for path in run.net(list(run.finished())[-1]).glob("*.safetensors"):  # a run has equal weights once on disk
        link_if_equal(path, out / path.name)
    run.keep("report.json", report)
    log_report(run, report, job.trainer.get("logger"))
    return report


# ------------------------------------------------------------------------------------------ the output


def print_report(report: dict[str, Any], out: Path, curves: Path) -> None:
    """Print a report as a table, choices, and the places of export, report and ``curves``; warn of a missed budget."""
    print_table(report)
    print_choices(report)
    warn_missed(report)
    print(f"ship this folder: {out}")
    if (curves / "report.json").is_file():
        print(f"report: {curves / 'report.json'}")
    if (curves / CURVES).is_dir():
        print(f"curves: tensorboard --logdir {curves}")


def warn_missed(report: dict[str, Any]) -> None:
    """Warn that the export is beyond its budget, or may be, or that its teacher knew nothing; the run is not lost."""
    if finding := near_chance(report):
        warnings.warn(f"the dense model has hardly learned anything: {finding}", stacklevel=2)
    if (budget := report.get("budget")) and not budget["met"]:
        advice = f"ask for {'more' if budget['kind'] == 'speedup' else 'less'}"
        if budget["met"] is None:
            advice = f"export again on a quiet machine, or {advice}"
        warnings.warn(f"{budget_line(budget)}; {advice}", stacklevel=2)


def print_choices(report: dict[str, Any]) -> None:
    """Print one line for everything that was chosen besides the folder itself; warn of integers that lose too much."""
    for line in choice_lines(report):
        print(line)
    made = report.get("program") or {}
    if "dtype" not in made:
        return
    dtype, metric, before = made["dtype"], made["metric"], report["compressed"]["metric"]
    sampled = made["interval"] and report["metric"]["name"] != "teacher_cosine"  # of dense: 1, always
    error = standard_error(made["interval"]) if sampled else (1 - LEAST_SHARE) * abs(before)
    lost = before - metric if report["metric"]["mode"] == "max" else metric - before
    if not lost <= error:
        what = f"the metric (dev {report['metric']['name']} {metric:.4f}, in float {before:.4f})"
        warnings.warn(f"{dtype} loses {what}; leave --dtype {dtype} out, or compress less", stacklevel=2)
