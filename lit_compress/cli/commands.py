"""The commands: fit, plan, compare, validate, test, predict, export, report, list, verify, bench, clean, ..."""

from __future__ import annotations

import argparse
import filecmp
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console

from lit_compress.cli.bench import bench_command
from lit_compress.cli.compare import compare_command
from lit_compress.cli.exporting import add_choices, print_choices, typed_choices
from lit_compress.cli.one_shot import KINDS, RATIOS, analyze_model, analyze_runs, factorize_model
from lit_compress.cli.options import CommandLine
from lit_compress.cli.parsers import one_line, parse_one_shot, silence_libraries
from lit_compress.cli.reporting import list_command, report_command, verify_command
from lit_compress.cli.targets import find_target, parse_stored
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.evaluation.predict import write_predictions
from lit_compress.export.choices import Choices
from lit_compress.export.folder import check_out
from lit_compress.export.report import print_table
from lit_compress.models.backbones import finetuned_on
from lit_compress.models.budget import budget_line
from lit_compress.run.changes import changed_line, go_on
from lit_compress.run.clean import clean as remove_leftovers
from lit_compress.run.details import keep_details
from lit_compress.run.finish import export_run
from lit_compress.run.folder import Run
from lit_compress.run.plan import (
    layer_notes,
    layers_table,
    show_plan,
    sizes_table,
    stages_table,
)
from lit_compress.run.rehearsal import measure_pace, stage_seconds
from lit_compress.run.runner import Components, check_stages, outline_of, run_stages
from lit_compress.run.settle import density_of_first, failure_told, settle_storage, solve_budget
from lit_compress.run.tensorboard import log_report
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import check_file, check_folder, read_json, write_json
from lit_compress.utils.progress import note


def fit(args: list[str]) -> None:
    """Run or continue all stages of a method, export the net, print the report."""
    silence_libraries()
    cli = CommandLine(args, "fit")
    config = cli.config
    if config.trainer.max_epochs is not None:
        raise UserError(
            f"trainer.max_epochs: {config.trainer.max_epochs} would hold for every stage; set model.<stage>.epochs"
        )
    for name in ("checkpoint_every", "max_skipped"):
        if config[name] < 1:
            raise UserError(f"{name}: {config[name]} is below 1, the smallest valid value")
    parts = cli.build()
    run = _run_of(cli, parts)
    with ExitStack() as claim:
        with failure_told(run):
            _choose_teacher(cli, run, parts.data.record, args)
            settle_budget(cli, run)
            begin = _prepare_run(run, cli, config.ckpt_path)
            if not rank_zero_only.rank:
                claim.enter_context(run.claim())
            if begin:
                begin()
        try:
            run_stages(
                cli.build, run, config.ckpt_path, config.checkpoint_every, config.max_skipped, config.allow_changed
            )
        except SIGTERMException as error:  # Lightning's would end the process with exit code 0
            print("stopped by SIGTERM; the same command with --ckpt_path last continues", file=sys.stderr)
            raise SystemExit(128 + signal.SIGTERM) from error
        _report(run, cli)


def _run_of(cli: CommandLine, parts: Components) -> Run:
    """Return the run folder that is asked for, or the usual one."""
    name = type(parts.method).__name__.lower()
    return Run(cli.config.run_dir or f"runs/{name}-{parts.data.record.name}")


def settle_budget(cli: CommandLine, run: Run | None = None) -> Components:
    """Find the density that meets the budget, if there is one; a run that is continued keeps the one it began with.

    Milliseconds differ between processes, so all take the density of the first.
    """
    parts = cli.build()
    cli.tokens = settle_storage(parts).tokens
    if (budget := parts.method.budget) is None:
        return cli.build()
    if run is not None:
        if rank_zero_only.rank and budget.kind == "speedup":
            cli.density = density_of_first(run, budget.asked)
        elif run.started:
            cli.density = run.density(budget.asked)
    if cli.density is None:
        cli.density = solve_budget(cli.build(), cli.at_density)
    return cli.build()


def _choose_teacher(cli: CommandLine, run: Run, task: Task, args: list[str]) -> None:
    """Choose the teacher where none is given: where a run is continued the one that it has, else maybe the backbone.

    A backbone that is fine-tuned on the labels of the data is the teacher, so that no dense stage is trained, unless
    options of the dense stage among ``args`` say otherwise.
    """
    init = cli.config.model.init_args
    if init.get("teacher"):
        return
    if run.started:
        init.teacher = run.config()["model"]["init_args"].get("teacher")
        return
    asked = any(arg.startswith(("--model.dense", "--model.teacher")) for arg in args)
    if asked or not finetuned_on(init.backbone, task):
        return
    init.teacher = init.backbone
    note(
        f"model.backbone: '{init.backbone}' is fine-tuned on these labels ({', '.join(task.labels)}): it is the "
        "teacher as it is; --model.dense.epochs 3 would fine-tune it first"
    )


@rank_zero_only
def _prepare_run(run: Run, cli: CommandLine, ckpt_path: str | None) -> Callable[[], None] | None:
    """Check that the run can work, and return what creates its folder; or check that it may be continued."""
    config = cli.dump()
    if not run.started:
        check_folder("run_dir", run.folder)
        if run.foreign:
            raise UserError(f"run_dir: '{run.folder}' holds something that is not a run; give a new folder")
        parts = cli.build()
        plan, facts = check_stages(parts), parts.data.facts()
        show_plan(parts.data.record.name, facts, plan)
        budget = parts.method.budget and {"asked": parts.method.budget.asked, "density": parts.method.density}
        return partial(run.begin, config, facts.as_dict(), budget)
    changed = run.check_same(config, cli.config.allow_changed)
    if ckpt_path is None:
        raise UserError(
            f"run_dir: '{run.folder}' exists already; continue it with --ckpt_path last, or give another --run_dir"
        )
    return go_on(run, config, changed, cli.build().method) if changed else None


@rank_zero_only
def _report(run: Run, cli: CommandLine) -> None:
    """Export the net, write the report, print the final table and log it to TensorBoard."""
    path = run.folder / "report.json"
    if path.is_file() and (run.folder / "export" / "report.json").is_file():
        report = read_json("run_dir", path, dict)
    else:
        parts = cli.build()
        report = export_run(run, run.folder / "export", parts.method, parts.data, parts.storage.choices)
        keep_details(run, parts.data)
        write_json(path, report)
        log_report(run, report)
    print_table(report)
    print_choices(report)
    _warn_missed(report)
    for change in report.get("changed") or ():
        print(f"changed: {changed_line(change)}")
    print(f"export: {run.folder / 'export'}\nreport: {path}\ncurves: tensorboard --logdir {run.folder}")


def _warn_missed(report: dict[str, Any]) -> None:
    """Say that the export is beyond its budget; the run is not lost."""
    if (found := report.get("budget")) and not found["met"]:
        warnings.warn(f"{budget_line(found)}; ask for {'more' if found['kind'] == 'speedup' else 'less'}", stacklevel=2)


def plan(args: list[str]) -> None:
    """Print what fit would build, its sizes, and how long the stages would take, without training."""
    silence_libraries()
    cli = CommandLine(args, "plan")
    first = cli.build()
    _choose_teacher(cli, _run_of(cli, first), first.data.record, args)
    parts = settle_budget(cli)
    made, facts = check_stages(parts), parts.data.facts()
    show_plan(parts.data.record.name, facts, made)
    found = outline_of(parts)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    console.print(layers_table(found))
    for line in layer_notes(found):
        print(line)
    console.print(sizes_table(found))
    console.print(stages_table(made, list(stage_seconds(parts, made, measure_pace(parts)))))


def compare(args: list[str]) -> None:
    """Run several methods, budgets and seeds from the same teachers with as many updates, and compare them."""
    compare_command(args, compare.__doc__)


def clean(args: list[str]) -> None:
    """Remove what nothing needs any more: checkpoints of finished stages, files that killed processes left."""
    parser = argparse.ArgumentParser(prog="python -m lit_compress clean", description=clean.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, finished or not")
    parser.error = one_line  # type: ignore[method-assign]
    run = Run(Path(parser.parse_args(args).run).expanduser())
    run.config()  # refuses what is no run
    removed = remove_leftovers(run)
    for path, size in removed.items():
        print(f"removed {path.relative_to(run.folder)}, {size:,} bytes")
    print(f"{sum(removed.values()):,} bytes are free; the nets of all stages, the export and the curves are kept")


def export(args: list[str]) -> None:
    """Write a finished run as a folder that loads without this package."""
    parser = argparse.ArgumentParser(prog="python -m lit_compress export", description=export.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    add_choices(parser)
    parser.error = one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    silence_libraries()
    run, out = Run(given.run), Path(given.out).expanduser()
    config = run.config()
    choices = replace(Choices(**config["export"]), **typed_choices(given))
    choices.check()
    check_out(out)
    parts = parse_stored(config, [], "export").build()
    report = export_run(run, out, parts.method, parts.data, choices)
    print(f"exported {given.out}: density {report['compressed']['density']:.4f}")
    print(f"reloaded alone, its logits differ by {report['export_difference']:.1e}")
    print_choices(report)


def report(args: list[str]) -> None:
    """Write the page of a run, of a comparison or of a folder of runs: tables, Pareto fronts, curves, answers."""
    report_command(args, report.__doc__)


def list_(args: list[str]) -> None:
    """List the methods, the tasks, the recipes, or the runs of a folder."""
    list_command(args, list_.__doc__)


def verify(args: list[str]) -> None:
    """Repeat the export and the metric of a finished run from its own record, and say whether they are the same."""
    silence_libraries()
    verify_command(args, verify.__doc__)


def bench(args: list[str]) -> None:
    """Time an export, or any fine-tuned model, beside a dense one, in the runtimes that are installed."""
    silence_libraries()
    bench_command(args, bench.__doc__)


def factorize(args: list[str]) -> None:
    """Factorize a fine-tuned model at once, without training, and export it."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress factorize", description=factorize.__doc__, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a model fine-tuned on the task")
    parser.add_argument("out", metavar="OUT", help="folder to write, a full export")
    add_choices(parser, programs=False)
    given, cli = parse_one_shot(parser, args, "factorize")
    out = Path(given.out).expanduser()
    check_out(out)
    parts = settle_budget(cli)
    report = factorize_model(out, parts.method, parts.data, cli.dump(), parts.storage.choices)
    print_table(report)
    if (loss := report["calibration"]) and loss["estimated_loss"] is not None:
        print(f"loss added: {loss['estimated_loss']:.2g} estimated, {loss['measured_loss']:.2g} measured on dev rows")
    print_choices(report)
    _warn_missed(report)
    print(f"export: {given.out}")


def analyze(args: list[str]) -> None:
    """Measure what truncation or pruning does to models, without training; write a table and a figure."""
    if args[:1] == ["allocation"]:
        return _analyze_runs(args[1:])
    parser = argparse.ArgumentParser(
        prog="python -m lit_compress analyze", description=analyze.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "kind", metavar="KIND",
        help="truncation: drop of the metric without each tenth of the components (FWSVD's Figure 1); sweep: metric "
        "over the ratio of ranks kept; spectra: singular values; ranks: numerical rank of every matrix, over the "
        "density for several models; neurons: histograms of the neurons' importance; pattern: which weights of a "
        "matrix are zero; allocation RUN [RUN ...] OUT: metric over the low-rank share of finished LoSparse runs",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="+",
                        help="model fine-tuned on the task; several for ranks, neurons, pattern")  # fmt: skip
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--weightings", nargs="+", default=["none", "fisher-in"], metavar="W",
                        help="none, fisher-in, fisher-out, fisher-both, fisher-element, importance-out")  # fmt: skip
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="for sweep: ranks kept / ranks")
    parser.add_argument("--site", help="for pattern: name of the matrix (default the first attention output)")
    given, cli = parse_one_shot(parser, args, "analyze")
    if given.kind not in KINDS:
        raise UserError(f"analyze: unknown kind '{given.kind}'; {nearest(given.kind, KINDS)}")
    parts, out = cli.build(), Path(given.out).expanduser()
    rows = analyze_model(
        given.kind, out, given.model, parts.method, parts.data, given.weightings, given.ratios, given.site
    )
    _say_rows(given.kind, out, len(rows))


def _analyze_runs(args: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m lit_compress analyze allocation", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a finished LoSparse run")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.error = one_line  # type: ignore[method-assign]
    given = parser.parse_args(args)
    out = Path(given.out).expanduser()
    _say_rows("allocation", out, len(analyze_runs(out, given.run)))


def _say_rows(kind: str, out: Path, count: int) -> None:
    print(f"{count} rows: {out / kind}.csv\nfigure: {out / kind}.png")


def validate(args: list[str]) -> None:
    """Print the dev metrics of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "validate")


def test(args: list[str]) -> None:
    """Print the metrics on the test split of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "test")


def predict(args: list[str]) -> None:
    """Write text, label and probability of every row as JSON lines."""
    _evaluate_command(args, "predict")


def _evaluate_command(args: list[str], command: str) -> None:
    """Load the net of a run, an export or a model; options override the config it was made with."""
    silence_libraries()
    name, out, rest = _target(args, command)
    target = find_target(name, command)
    path = out or target.folder / "predictions.jsonl"
    if command == "predict":
        check_file("--output", path)
    parts = target.parse(rest, command).build()
    parts.data.backbone = str(target.folder)  # the tokenizer that belongs to the net
    parts.data.whole_file = _is_another_file(target.trained_on, parts.data.path)
    if command == "predict" and path.exists() and path.samefile(Path(parts.data.path or "/").expanduser()):
        raise UserError(f"--output: '{path}' is the file that is read; give another")
    net = target.load(parts.data.record)
    if command == "predict":
        print(f"{write_predictions(net, parts.data, path)} predictions: {path}")
    else:
        for metric, value in evaluate(net, parts.data, command, sure=True).items():
            print(f"{metric} {value}" if isinstance(value, int) else f"{metric} {value:.6f}")


def _is_another_file(known: str | None, given: str | None) -> bool:
    """Say whether ``given`` is a single file, and not the content of that which the net was trained on."""
    file, trained = (Path(path or "").expanduser() for path in (given, known))
    return file.is_file() and not (trained.is_file() and filecmp.cmp(file, trained, shallow=False))


def _target(args: list[str], command: str) -> tuple[str, Path | None, list[str]]:
    """Split TARGET and --output from the options that override the stored config."""
    parser = argparse.ArgumentParser(prog=f"python -m lit_compress {command}", allow_abbrev=False)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="folder of a finished run, of an export, of a net of a run, or of any fine-tuned model (with --data.task);"
        " then any option of fit, e.g. --data.path DIR",
    )
    if command == "predict":
        parser.add_argument(
            "--output", metavar="FILE", help="JSON lines to write; default predictions.jsonl beside the net"
        )
    parser.error = one_line  # type: ignore[method-assign]
    out, rest = _output(args) if command == "predict" else (None, args)
    return parser.parse_args(rest[:1]).target, out, rest[1:]


def _output(args: list[str]) -> tuple[Path | None, list[str]]:
    """Take --output out of the arguments, wherever it stands."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--output", type=Path)
    parser.error = one_line  # type: ignore[method-assign]
    given, rest = parser.parse_known_args(args)
    return given.output and given.output.expanduser(), rest
