"""``fit`` without its output, shared with other commands: budgets, trials, the choice of the teacher."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.cli.options import CommandLine
from lit_compress.evaluation.chance import near_chance
from lit_compress.export.speed_asked import Programs
from lit_compress.models.backbones import finetuned_on, given_dtype
from lit_compress.models.budget import budget_line
from lit_compress.models.storage import load_net
from lit_compress.run.finish import export_run, share_weights
from lit_compress.run.first import is_first_process, of_first
from lit_compress.run.folder import Run
from lit_compress.run.guard import check_fit
from lit_compress.run.loggers import log_report
from lit_compress.run.pages import keep_details
from lit_compress.run.plan import show_plan
from lit_compress.run.runner import run_stages
from lit_compress.run.settle import Components, check_stages, settle_storage, shapes_of, solve_budget, speed_place
from lit_compress.run.trials import choose_removal, possible_kind
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import check_folder, read_json
from lit_compress.utils.progress import note
from lit_compress.utils.sharding import alone
from lit_compress.utils.tables import print

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.cli.words import Line
    from lit_compress.methods import Method
    from lit_compress.stages.weighting import Removes


def run_fit(line: Line) -> tuple[Run, dict[str, Any] | None]:
    """Run or continue all stages of a method, and export the model.

    Args:
        line: options of ``fit``.

    Returns:
        The run, and its report; None for the report on all processes but the first.

    Raises:
        UserError: an option, the data, the backbone or the run folder cannot be used.
    """
    cli = CommandLine(line, "fit")
    config = cli.config
    run = run_of(cli)
    with ExitStack() as claim:
        told = of_first("run", partial(_prepare, cli, run, claim), cli.build().trainer)
        if not is_first_process():
            _take(cli, run, **told)
        with ended_by_sigterm("the same command with --ckpt_path last continues"):
            limits = config.checkpoint_every, config.max_skipped
            run_stages(cli.build, run, config.ckpt_path, *limits, partial(decide_run, cli, run))
        return run, _report(run, cli)


@contextmanager
def ended_by_sigterm(advice: str) -> Iterator[None]:
    """End the process with the exit code of SIGTERM, and a line, if a stage inside was stopped by it."""
    try:
        yield
    except SIGTERMException as error:  # Lightning's would end the process with exit code 0
        print(f"stopped by SIGTERM; {advice}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from error


def decide(cli: CommandLine, dense: PreTrainedModel) -> tuple[list[dict[str, Any]], Programs | None]:
    """Try kinds of removal and densities on the fine-tuned model and choose; ``cli`` builds the choice from now on.

    Args:
        cli: whose method has kinds to try.
        dense: on the CPU, before and afterwards.

    Returns:
        The field ``tried`` of the report, and the programs that were timed, if the budget is a speed-up.

    Raises:
        UserError: as :func:`choose_removal`.
    """
    parts, begin, timed = cli.build(), cli.density, None
    if parts.method.budget is not None and parts.method.budget.kind == "speedup":
        net = shapes_of(parts.method)
        timed = Programs(net, parts.data.tokenizer, speed_place(parts, net))

    def build(density: float | None, removes: Removes | None) -> Method:
        return cli.at_density(begin if density is None else density, removes)

    trials = choose_removal(dense, build, parts.data, parts.storage, timed, begin)
    best = next(trial for trial in trials if trial.chosen)
    cli.at_density(best.density, best.removes)
    return [asdict(trial) for trial in trials], timed


def decide_run(cli: CommandLine, run: Run, dense: Path) -> None:
    """Choose the kind of removal of a run by trials on the ``dense`` model; a run that has chosen keeps it.

    All processes take the first one's choice, which makes it while they wait for its file.

    Raises:
        UserError: as :func:`decide`.
    """
    method = cli.at_density(cli.density)
    if not method.kinds:
        return
    asked = [method.budget.asked if method.budget else f"density={method.density:g}", *method.kinds]

    def choose() -> dict[str, Any]:
        if (known := run.removal(asked)) is not None:
            return known
        with alone():
            tried, _ = decide(cli, load_net(dense))
        run.keep_removal({"asked": asked, "density": cli.density, "removes": cli.removes, "tried": tried})
        return {"density": cli.density, "removes": cli.removes}

    chosen = of_first("removal", choose, cli.build().trainer)
    cli.at_density(chosen["density"], chosen["removes"])


def run_of(cli: CommandLine) -> Run:
    """Return the run folder that is asked for, or the usual one."""
    name = cli.config.model.class_path.rpartition(".")[2].lower()
    return Run(cli.config.run_dir or f"runs/{name}-{cli.config.data.task}")


def _prepare(cli: CommandLine, run: Run, claim: ExitStack) -> dict[str, Any]:
    """Settle everything about a run and begin it, or check that it may be continued; return its parts.

    Args:
        cli: of the command.
        run: its folder.
        claim: keeps the folder.
    """
    parts = cli.ready(run.config() if run.started else None)
    choose_teacher(cli, run, parts.data.record)
    settle_budget(cli, run)
    begin = _prepare_run(run, cli)
    claim.enter_context(run.claim())
    if begin:
        begin()
    return {"config": cli.dump(), "density": cli.density}


def _take(cli: CommandLine, run: Run, config: dict[str, Any], density: float | None) -> None:
    """Take what the first process settled: commits of names, the teacher, the density."""
    init, stored = cli.config.model.init_args, config["model"]["init_args"]
    init.teacher = stored.get("teacher")
    _keep_chosen(init, stored)
    cli.ready(config)
    settle_budget(cli, run, density=density)


def settle_budget(
    cli: CommandLine, run: Run | None = None, known: bool = True, density: float | None = None
) -> Components:
    """Find the density that meets the budget, if there is one; a run that is continued keeps the one it began with.

    The export gets the program of the runtime in which a speed-up is measured.

    Args:
        cli: builds the components.
        run: that may be continued; None for a command that makes none.
        known: False: the density is found later, on the fine-tuned model.
        density: that the first process found; None: it is not known.
    """
    _settle_dtype(cli, run)
    if cli.build().method.kinds:  # trials choose among them later
        cli.at_density(None, possible_kind(cli.at_density, shapes_of(cli.build().method)))
    parts = cli.build()
    cli.tokens = settle_storage(parts).tokens
    if (budget := parts.method.budget) is None:
        return cli.build()
    if budget.kind == "speedup":
        place = speed_place(parts, shapes_of(parts.method))
        where = "one thread" if place.device == "cpu" else "bfloat16"
        note(f"budget {budget.asked}: measured in {place}, {where}")
        cli.config.export.format, cli.config.export.dtype = place.choices.format, place.choices.dtype
    cli.density = run.density(budget.asked) if density is None and run is not None and run.started else density
    if cli.density is None and known:
        cli.density = solve_budget(cli.build(), partial(cli.at_density, removes=cli.removes))
    return cli.build()


def _settle_dtype(cli: CommandLine, run: Run | None) -> None:
    """Let the export have the dtype of the model that was given, if no other was asked for; a run keeps its own."""
    choices, method = cli.config.export, cli.build().method
    if choices.dtype != "auto":
        return
    if run is not None and run.started:
        choices.dtype = run.config()["export"]["dtype"]
    elif choices.format != "hf" or (method.budget is not None and method.budget.kind == "speedup"):
        choices.dtype = "float32"
    else:
        option = "model.teacher" if method.teacher not in (None, method.backbone) else "model.backbone"
        choices.dtype = given_dtype(method.teacher or method.backbone, method.task, option)


def choose_teacher(cli: CommandLine, run: Run, task: Task) -> None:
    """Choose the teacher where none is given: where a run is continued the one that it has, else maybe the backbone.

    A backbone that is fine-tuned on the labels of the data, or whose vectors are the labels, is the teacher, so that no
    dense stage is trained, unless options of the dense stage were given.
    """
    init = cli.config.model.init_args
    if run.started:
        _keep_chosen(init, run.config()["model"]["init_args"])
    if init.get("teacher"):
        return
    if run.started:
        init.teacher = run.config()["model"]["init_args"].get("teacher")
        cli.ready(run.config())
        return
    asked = any(name.startswith(("model.dense", "model.teacher")) for name in cli.line.names)
    if not finetuned_on(cli.build().method.backbone, task) or asked:
        return
    cli.backbone_as_teacher()
    if not task.labels:
        note(f"model.backbone: '{init.backbone}' is the teacher: the model learns its vectors")
        return
    note(
        f"model.backbone: '{init.backbone}' is fine-tuned on these labels ({', '.join(task.labels)}): it is the "
        "teacher; --model.dense.epochs 3 would fine-tune it first"
    )


def _keep_chosen(init: Any, stored: dict[str, Any]) -> None:
    """Give stages the values of the run where an earlier version had other defaults."""
    for name, settings in stored.items():
        for option in ("labels", "removes"):
            if isinstance(settings, dict) and settings.get(option) and option in (init.get(name) or {}):
                init[name][option] = init[name][option] or settings[option]


def _prepare_run(run: Run, cli: CommandLine) -> Callable[[], None] | None:
    """Check that the run can work, and return what creates its folder; or check that it may be continued."""
    config, parts = cli.dump(), cli.build()
    if not run.started:
        check_folder("run_dir", run.folder)
        if run.foreign:
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        plan, facts = check_stages(parts), parts.data.facts()
        show_plan(parts.data.record.name, facts, plan)
        check_fit(parts, shapes_of(parts.method))
        asked = parts.method.budget
        budget = {"asked": asked.asked, "density": parts.method.density} if asked else None
        return partial(run.begin, config, facts.as_dict(), budget)
    run.check_same(config)
    if cli.config.ckpt_path is None:
        raise UserError(
            f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir"
        )
    return None


@rank_zero_only
def _report(run: Run, cli: CommandLine) -> dict[str, Any]:
    """Export the model, write the report and log it; return what is there already."""
    path = run.folder / "report.json"
    if path.is_file() and (run.folder / "export" / "report.json").is_file():
        run.check("report.json")
        return read_json("run_dir", path, dict)
    parts = cli.build()
    parts.data.backbone = str(run.net("dense"))  # the tokenizer of the run, as a later export reads it
    report = export_run(run, run.folder / "export", parts.method, parts.data, parts.storage.choices)
    share_weights(run.net(list(run.finished())[-1]), run.folder / "export")
    keep_details(run, parts.data)
    run.keep("report.json", report)
    log_report(run, report, parts.trainer.get("logger"))
    return report


def warn_missed(report: dict[str, Any]) -> None:
    """Say that the export is beyond its budget, or may be, or that its teacher knew nothing; the run is not lost."""
    if finding := near_chance(report):
        warnings.warn(f"the dense model has hardly learned anything: {finding}", stacklevel=2)
    if (budget := report.get("budget")) and not budget["met"]:
        advice = f"ask for {'more' if budget['kind'] == 'speedup' else 'less'}"
        if budget["met"] is None:
            advice = f"export again on a quiet machine, or {advice}"
        warnings.warn(f"{budget_line(budget)}; {advice}", stacklevel=2)
