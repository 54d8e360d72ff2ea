"""The commands: fit, plan, compare, validate, test, predict, export, report, list, verify, bench, clean, ..."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lit_compress.cli.bench import bench_command
from lit_compress.cli.compare import compare_command
from lit_compress.cli.exporting import add_choices, print_choices, typed_choices
from lit_compress.cli.fitting import choose_teacher, run_factorize, run_fit, run_of, settle_budget, warn_missed
from lit_compress.cli.options import CommandLine
from lit_compress.cli.parsers import Parser, add_consent, consent, silence_libraries
from lit_compress.cli.reporting import list_command, report_command, verify_command
from lit_compress.cli.targets import find_target, is_export, load_checked, open_run, open_target
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.evaluation.predict import write_predictions
from lit_compress.export.choices import Choices
from lit_compress.export.copies import check_push, push
from lit_compress.export.folder import check_again, check_out, export_again
from lit_compress.export.table import of_all, print_table
from lit_compress.run.finish import export_run
from lit_compress.run.folder import Run
from lit_compress.run.guard import check_fit
from lit_compress.run.loggers import where_curves_are
from lit_compress.run.plan import layer_notes, layers_table, show_plan, sizes_table
from lit_compress.run.settle import check_stages, outline_of, shapes_of
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import check_file
from lit_compress.utils.tables import print


def fit(args: list[str]) -> None:
    """Run or continue all stages of a method, export the model, print the report."""
    silence_libraries()
    run, report = run_fit(args)
    if report is not None:
        _print_run(run, report)


def _print_run(run: Run, report: dict[str, Any]) -> None:
    """Print the final table and where everything is."""
    print_table(report)
    print_choices(report)
    warn_missed(report)
    print(f"ship this folder: {run.folder / 'export'}")
    print(f"report: {run.folder / 'report.json'}\ncurves: {where_curves_are(run)}")


def plan(args: list[str]) -> None:
    """Print the structure and the sizes of a fit, without training."""
    silence_libraries()
    cli = CommandLine(args, "plan")
    first = cli.ready()
    choose_teacher(cli, run_of(cli), first.data.record, args)
    parts = settle_budget(cli)
    made, facts = check_stages(parts), parts.data.facts()
    show_plan(parts.data.record.name, facts, made)
    outline = outline_of(parts)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    console.print(layers_table(outline))
    for line in layer_notes(outline):
        print(line)
    console.print(sizes_table(outline))
    check_fit(parts, shapes_of(parts.method))


def compare(args: list[str]) -> None:
    """Run several methods, budgets and seeds from the same teachers with equal training steps, and compare them."""
    compare_command(args, compare.__doc__)


def clean(args: list[str]) -> None:
    """Remove files that nothing needs: checkpoints of finished stages, leftovers of killed processes."""
    parser = Parser(prog="python -m lit_compress clean", description=clean.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, finished or not")
    run = Run(Path(parser.parse_args(args).run).expanduser())
    run.recorded()  # refuses what is no run
    removed = run.clean()
    for path, size in removed.items():
        print(f"removed {path.relative_to(run.folder)}, {size:,} bytes")
    print(f"{sum(removed.values()):,} bytes are free; the models of all stages, the export and the curves are kept")


def export(args: list[str]) -> None:
    """Write a finished run as a folder that loads without this package; or an export again, with a program."""
    parser = Parser(prog="python -m lit_compress export", description=export.__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a finished run, or of an export")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    add_choices(parser)
    parser.add_argument("--data.path", dest="path", help="data to check the program of an export on; default its own")
    parser.add_argument("--push_to_hub", metavar="USER/NAME", help="also upload the folder to the Hugging Face hub")
    parser.add_argument(
        "--private", action="store_true", help="the repository of --push_to_hub is private; a public one is refused"
    )
    add_consent(parser)
    given = parser.parse_args(args)
    rest = consent(given)
    if given.push_to_hub:
        check_push(given.push_to_hub, given.private)
    elif given.private:
        raise UserError("--private: export reads it with --push_to_hub only; leave it out")
    silence_libraries()
    out, source, asked = Path(given.out).expanduser(), Path(given.run).expanduser(), typed_choices(given)
    if is_export(source):
        check_again(source, asked)
        rest += [f"--data.path={given.path}"] * bool(given.path)
        parts = open_target(find_target(given.run, "export"), rest, "export")
        report = export_again(source, out, parts.data, Choices(**asked))
    else:
        run = Run(given.run)
        config = run.config(strict=True)
        if given.path:
            raise UserError("export: --data.path is for an export; a run is measured on its own data")
        choices = replace(Choices(**config["export"]), **asked)
        if choices.half and choices.format != "hf" and "dtype" not in asked:  # the program has no 16 bits
            choices = replace(choices, dtype="float32")
        choices.check()
        check_out(out)
        parts = open_run(run, rest, "export")
        report = export_run(run, out, parts.method, parts.data, choices)
    print(f"exported {given.out}: density {report['compressed']['density']:.4f}")
    if report["export_difference"] is not None:
        print(f"reloaded alone, its logits differ by {report['export_difference']:.1e}")
    print_choices(report)
    if given.push_to_hub:
        print(f"pushed: {push(out, given.push_to_hub, given.private)}")


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
    """Time an export, or any fine-tuned model, and a dense one, in the runtimes that are installed."""
    silence_libraries()
    bench_command(args, bench.__doc__)


def factorize(args: list[str]) -> None:
    """Factorize a fine-tuned model at once, without training, and export it."""
    silence_libraries()
    out, report = run_factorize(args, factorize.__doc__)
    print_table(report)
    if (loss := report["calibration"]) and loss["estimated_loss"] is not None:
        estimated, measured = (f"{loss[f'{name}_loss']:.2g}" for name in ("estimated", "measured"))
        print(f"added to the loss of an example: {estimated} estimated, {measured} measured on dev rows")
    if refined := report["refined"]:
        print(f"refined: {refined['steps']} steps of every block, {refined['texts']:,} texts")
    if distilled := report.get("distilled"):
        print(f"distilled: {distilled['steps']} steps, {distilled['texts']:,} texts")
    print_choices(report)
    warn_missed(report)
    print(f"ship this folder: {out}")


def validate(args: list[str]) -> None:
    """Print the dev metrics of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "validate")


def test(args: list[str]) -> None:
    """Print the metrics on the test split of a run, an export or any fine-tuned model."""
    _evaluate_command(args, "test")


def predict(args: list[str]) -> None:
    """Write text, label and probability of every row as JSON lines."""
    _evaluate_command(args, "predict")


def _evaluate_command(args: list[str], command: Literal["validate", "test", "predict"]) -> None:
    """Load the model of a run, an export or a model; options override the config it was made with."""
    silence_libraries()
    name, out, rest = _target(args, command)
    target = find_target(name, command)
    path = out or target.place / "predictions.jsonl"
    if command == "predict":
        check_file("--output", path)
    parts = open_target(target, rest, command)
    if command == "predict":
        task_type(parts.data.record).check_answers()
    if command == "predict" and path.exists() and path.samefile(Path(parts.data.place.path or "/").expanduser()):
        raise UserError(f"--output: '{path}' is the file that is read; give another")
    net = load_checked(target, parts, command)
    if command == "predict":
        rows = of_all(write_predictions(net, parts.data, path), parts.data.available(command)[0])
        print(f"predicted {rows} rows of split {parts.data.predicted}: {path}")
        return
    scores = evaluate(net, parts.data, command, sure=True)
    for name, value in scores.items():
        split, _, what = name.rpartition("/")
        if what == "rows":
            available = scores.get(f"{split}/available")
            print(f"{name} {value}" if available is None else f"{name} {value} of {available}")
        elif what != "available":
            print(f"{name} {value:.6f}")


def _target(args: list[str], command: str) -> tuple[str, Path | None, list[str]]:
    """Split TARGET and --output from the options that override the stored config."""
    parser = Parser(prog=f"python -m lit_compress {command}", allow_abbrev=False)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="folder of a finished run, an export, a model of a run, or any fine-tuned model (with --data.task),"
        " or a name on the hub, OWNER/NAME[@REVISION];"
        " then fit's options of the data, e.g. --data.path DIR, --device cpu",
    )
    if command == "predict":
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="JSON lines to write; default predictions.jsonl in the model's folder, or here for a name on the hub",
        )
    out, rest = _output(args) if command == "predict" else (None, args)
    return parser.parse_args(rest[:1]).target, out, rest[1:]


def _output(args: list[str]) -> tuple[Path | None, list[str]]:
    """Take --output out of the arguments, wherever it is."""
    parser = Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--output", type=Path)
    given, rest = parser.parse_known_args(args)
    return given.output and given.output.expanduser(), rest
