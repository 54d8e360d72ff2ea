"""The commands. A command is a function: its parameters are its own options, its docstring is its help.

``line`` has the other options, which are ``fit``'s: each command reads some (words.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lit_compress.cli.bench import bench as bench
from lit_compress.cli.compare import compare as compare
from lit_compress.cli.factorizing import factorize as factorize
from lit_compress.cli.fitting import (
    choose_teacher,
    print_choices,
    print_report,
    run_fit,
    run_of,
    settle_budget,
    warn_missed,
)
from lit_compress.cli.options import CommandLine
from lit_compress.cli.targets import find_target, is_export, load_checked, open_target, parse_stored
from lit_compress.cli.words import Line
from lit_compress.data.sources import ALL, sources_at
from lit_compress.evaluation.evaluate import evaluate as evaluate_net
from lit_compress.evaluation.evaluate import write_predictions
from lit_compress.export.choices import Choices
from lit_compress.export.folder import check_again, check_out, check_owner, export_again
from lit_compress.export.table import of_all
from lit_compress.run import pages
from lit_compress.run.finish import export_run
from lit_compress.run.folder import Run
from lit_compress.run.guard import check_fit
from lit_compress.run.results import read_results
from lit_compress.run.settle import check_stages
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import check_folder
from lit_compress.utils.tables import print, show

FREE = ("data.batch_size", "data.eval_batch_size", "data.num_workers")  # data options that change no result
LISTED = ("name", "task", "label", "budget", "seed", "status", "metric_name", "dense_metric", "metric", "density",
          "steps", "seconds")  # fmt: skip


def fit(line: Line) -> None:
    """Run or continue all stages of a method, export the model, print the report."""
    run, report = run_fit(line)
    if report is not None:
        print_report(report, run.folder / "export", run.folder)


def plan(line: Line) -> None:
    """Print the structure and the sizes of a fit, without training."""
    cli = CommandLine(line)
    choose_teacher(cli, run_of(cli))
    job = settle_budget(cli)
    check_stages(job, layers=True)
    check_fit(job)


def export(run: str, out: str, *, line: Line, **choices: Any) -> None:
    """Write a finished run as a folder that loads without this package; or an export again, with a program.

    Args:
        run: folder of a finished run, or of an export. By default its choices for the export are the run's.
        out: folder to write.
        line: further options: where the data of an export are, for a program of integers.
        **choices: see Choices.
    """
    place, source = Path(out).expanduser(), Path(run).expanduser()
    choices = {name: value for name, value in choices.items() if value != "auto"}  # as it is
    check_owner(place, source)
    if is_export(source):
        check_again(source, choices)
        parts = open_target(find_target(run, "export"), line)
        report = export_again(source, place, parts.data, Choices(**choices))
    else:
        found = Run(run)
        config, done = found.config(), found.finished()
        for name in line.names:
            if name.startswith(("data.", "config", "model.", "seed_everything")) and name not in FREE:
                raise UserError(f"export: --{name} is for an export; a run is measured on its own data")
        asked = replace(Choices(**config["export"]), **choices)
        if asked.half and asked.format != "hf" and "dtype" not in choices:  # the program has no 16 bits
            asked = replace(asked, dtype="float32")
        asked.check()
        last = list(done.values())[-1] if "dense" in done else {}
        if not (last.get("last") or (source / "report.json").is_file()):
            raise UserError(f"export: '{source}' is not finished; repeat its command, fit with --ckpt_path last")
        check_out(place)
        data = parse_stored(config, line, found.net("dense")).build().data
        if (measured := (found.facts() or {}).get("dev")) and measured != data.dev_contents():
            raise UserError(
                f"data.path: the dev rows of '{source}' have changed since they were measured; give the same"
            )
        report = export_run(found, place, data, asked)
    print(f"exported {out}: density {report['compressed']['density']:.4f}")
    if report["export_difference"] is not None:
        print(f"reloaded alone, its logits differ by {report['export_difference']:.1e}")
    print_choices(report)
    warn_missed(report)


def report(folder: str, *, out: str | None = None) -> None:
    """Write the page of a run, of a comparison or of a folder of runs: tables, Pareto fronts, layers.

    Args:
        folder: a run, an export, a comparison or a folder of runs.
        out: folder to write (default report in FOLDER).
    """
    print(f"page: {pages.write(Path(folder), Path(out) if out else None)}")


def evaluate(target: str, line: Line, *, split: Literal["validation", "test"] = "validation") -> None:
    """Print the metrics of a run, an export or any fine-tuned model, on the dev split or on the test split.

    Args:
        target: folder of a finished run, an export, a model of a run, or any fine-tuned model (with --data.task), or a
            name on the hub, OWNER/NAME[@REVISION].
        line: further options, which override the config that the model was made with.
        split: which one is scored.
    """
    found = find_target(target, line.command)
    parts = open_target(found, line)
    scores = evaluate_net(load_checked(found, parts, split), parts.data, split, sure=True)
    for name, value in scores.items():
        part, _, what = name.rpartition("/")
        if what == "rows":
            available = scores.get(f"{part}/available")
            print(f"{name} {value}" if available is None else f"{name} {value} of {available}")
        elif what != "available":
            print(f"{name} {value:.6f}")


def predict(target: str, line: Line, *, output: str | None = None) -> None:
    """Write text, label and probability of every row as JSON lines.

    Args:
        target: as of evaluate.
        line: further options, which override the config that the model was made with, e.g. --data.path DIR.
        output: JSON lines to write; default predictions.jsonl in the folder of the run or the model, or here for a name
            on the hub.
    """
    found = find_target(target, "predict")
    of_run = found.folder.name == "export" and found.folder.parent == Path(target).expanduser()  # it is shipped
    place = found.folder.parent if of_run else found.place
    path = Path(output).expanduser() if output else place / "predictions.jsonl"
    check_folder("--output", path, file=True)
    if path.is_file():
        with path.open("rb") as there:
            if there.read(2) not in (b"", b'{"'):
                raise UserError(f"--output: '{path}' holds something that is not a prediction; give another file")
    parts = open_target(found, line)
    if not task_type(parts.data.record).answered:
        raise UserError("predict: a language model has no answer for a row; `evaluate` gives its perplexity")
    sources = sources_at(parts.data.record, parts.data.place, [ALL, "test"]).values()
    trained = Path((found.config or {}).get("data", {}).get("path") or "/").expanduser()
    read = [trained, *(file for source in sources for file in source.files)]
    if path.exists() and any(file.exists() and path.samefile(file) for file in read):
        raise UserError(f"--output: '{path}' is a file that is read; give another")
    net = load_checked(found, parts, "predict")
    rows = of_all(*write_predictions(net, parts.data, path))
    print(f"predicted {rows} rows of split {parts.data.predicted}: {path}")


def list_(folder: str = "runs") -> None:
    """List the runs of a folder.

    Args:
        folder: with runs, finished or not.
    """
    runs, _ = read_results(Path(folder).expanduser(), "list")
    values = (("" if record[name] is None else record[name] for name in LISTED) for record in map(pages.record, runs))
    texts = ([f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in values)
    show(LISTED, texts, left=len(LISTED))
