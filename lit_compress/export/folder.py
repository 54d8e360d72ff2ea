"""Writing of an export: a folder that loads where this package is not installed."""

from __future__ import annotations

import copy
import fnmatch
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import constant_answer, evaluate, interval_of
from lit_compress.evaluation.intervals import FRACTIONS
from lit_compress.export.card import write_report_and_card
from lit_compress.export.check import check_export
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.copies import PROGRAMS, copy_export, export_folder
from lit_compress.export.fuse import fuse, shrink
from lit_compress.export.integers import INTEGERS, quantize_program
from lit_compress.export.modelling import MODULE, write_model
from lit_compress.export.program import write_program
from lit_compress.export.report import Measured, build_report
from lit_compress.export.speed_asked import Programs, find_place
from lit_compress.models.budget import Budget, parse_budget
from lit_compress.models.checks import check_head
from lit_compress.models.files import net_bytes
from lit_compress.models.own_code import forget_code
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.tasks.sentences import write_pooling
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import check_folder, read_json
from lit_compress.utils.memory import trim
from lit_compress.utils.progress import track
from lit_compress.utils.types import Config, Model


def check_out(out: Path) -> None:
    """Raise a UserError if a folder cannot be written, or holds something else than an export."""
    check_folder("export", out)
    names = {path.name for path in out.iterdir() if path.suffix != ".tmp"} if out.exists() else set()
    of_run = "report.json" not in names and (out.resolve().parent.parent / "config.yaml").is_file()  # RUN/<stage>/net
    if names and ("structure.json" not in names or of_run):
        raise UserError(f"export: '{out}' holds something that is not an export; give an empty or new folder")


def check_owner(out: Path, source: Path | None = None) -> None:
    """Raise a UserError if ``out`` is the export of a run, and ``source`` neither that run nor its export."""
    place = out.resolve()
    own = source is not None and source.resolve() in (place, place.parent)
    if place.name == "export" and (place.parent / "config.yaml").is_file() and not own:
        raise UserError(f"export: '{out}' is the result of a run; give another folder")


def read_task(data: DataModule) -> Task:
    """Return the task of ``data`` with the length that is read at most."""
    return replace(data.record, length=min(data.record.length, data.max_length))


@dataclass
class Export:
    """The exported model and data, and the fields of its report besides the measurements.

    Attributes:
        before: stage -> model of that stage, with its metrics; the first is dense.
        data: for the dev metric of the exported model.
        initial: dev metric before the last stage's first step.
        more: further fields of the report.
        budget: to check the export against, and the density that was to meet it.
    """

    net: Model
    before: dict[str, Measured]
    method: str
    data: DataModule
    config: dict[str, Any]
    initial: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    budget: tuple[Budget, float] | None = None

    @property
    def dense(self) -> Model:
        """The model before compression."""
        return next(iter(self.before.values())).net


def write_export(out: Path, source: Export, choices: Choices = AS_IS) -> dict[str, Any]:
    """Write a model as a folder that loads without this package; write and return its report.

    The steps: fuse, shrink, write, check, measure, report. The folder appears only after the last, in place of an
    earlier export.

    Raises:
        UserError: ``out`` has other files; a check fails; the model cannot have the choices.
    """
    choices.check(source.net)
    check_out(out)
    with export_folder(out) as folder:
        net, data, facts = shrink(fuse(source.net), source.data, choices)
        write_model(net, folder)
        write_tokenizer(data, folder, net.config)
        del net  # the export takes its place in memory
        net = load_net(folder)
        trim()
        changed = choices.half or any(facts.values())
        for _ in track([0], "check the export in another process"):
            facts["export_difference"] = check_export(net, folder, None if changed else source.net)
        report = _measured(source, net, evaluate(net, data, sure=True), folder, choices) | facts
        _write_programs(report, net, data, folder, choices)
        return _finish(report, source, net, folder, choices)


def describe_shards(folder: Path, source: Export, scores: dict[str, float], choices: Choices) -> dict[str, Any]:
    """Write the other files of an export whose tensors are in ``folder``, and return its report.

    ``source`` has models without values, ``scores`` are the export's. Times and the comparison in another process are
    null.

    Raises:
        UserError: it loses more than ``max_drop``.
    """
    write_tokenizer(source.data, folder, source.net.config)
    report = _measured(source, source.net, scores, folder, choices)
    report |= dict.fromkeys(("export_difference", "vocabulary", "embeddings"))
    return _finish(report, source, source.net, folder, choices)


def _measured(source: Export, net: Model, scores: dict[str, float], folder: Path, choices: Choices) -> dict[str, Any]:
    """Return the report of all models, the export as the stage ``compressed``, and facts on its layers and files."""
    task, key = read_task(source.data), f"val/{source.data.record.metrics[0]}"
    own = replace(Measured.by(scores, net, net_bytes(folder), source.data.record), initial=source.initial)
    nets, first = {**source.before, "compressed": own}, next(iter(source.before))
    if own.interval and nets[first].interval is None and task.metrics[0] not in FRACTIONS:
        ends = interval_of(evaluate(source.dense, source.data, sure=True), key)
        nets[first] = replace(nets[first], interval=ends)
    report = build_report(task, source.method, nets, source.config, scores) | constant_answer(source.data)
    return report | {
        "dtype": choices.dtype if choices.half else "float32",
        "ordinary": not (folder / f"{MODULE}.py").exists(),
        "refuses": bool(getattr(net.config, "structure", None)),
    }


def _finish(report: dict[str, Any], source: Export, net: Model, folder: Path, choices: Choices) -> dict[str, Any]:
    """Check the export against what was asked, and write and return its report."""
    choices.check_drop(report)
    budget, density = source.budget or (None, 1.0)
    if budget and budget.kind == "speedup":
        place = find_place(budget, choices, source.dense, read_task(source.data).length)
        timed = Programs(source.dense, source.data.tokenizer, place)
        made = folder / report["program"]["file"] if "program" in report else None
        report["speed"] = timed.speed_of(net, made)
    report["budget"] = budget and budget.check(report, density)
    report |= source.more
    write_report_and_card(folder, report, read_task(source.data), net)
    return report


def check_again(source: Path, asked: dict[str, Any]) -> None:
    """Raise a UserError if one of the choices, by name, would change the weights of the export ``source``."""
    for name, value in asked.items():
        if name not in ("format", "max_drop") and not (name == "dtype" and value in INTEGERS):
            raise UserError(
                f"export: --{name} {value} changes the weights, and '{source}' is an export; give the run, or "
                f"'factorize ... --{name} {value}'; nearest: --format onnx"
            )


def export_again(source: Path, out: Path, data: DataModule, choices: Choices) -> dict[str, Any]:
    """Copy an export to ``out``, with the program that is asked for in place of any other; return its report.

    Data are read with its tokenizer; choices are ``format``, ``dtype`` of integers and ``max_drop``.

    Raises:
        UserError: ``out`` has other files; the data are of another task; as :func:`copy_export`; the program cannot be
            written.
    """
    check_out(out)
    report = read_json("export", source / "report.json", dict)
    with export_folder(out) as temporary:
        choices.check(net := load_net(source))
        check_head(f"export: '{source}'", net.config, data.record)
        if choices.integers:  # their metric is compared with that of the report
            if (name := report["metric"]["name"]) not in data.record.metrics:
                raise UserError(
                    f"export: '{source}' was measured by {name}, and these rows give {data.record.metrics[0]}; give "
                    "the rows it was measured on"
                )
            if (report.get("data") or {}).get("dev") not in (None, data.dev_contents()):
                raise UserError(f"data.path: '{source}' was measured on other dev rows; give those")
            known, here = report["compressed"]["metric"], evaluate(net, data)[f"val/{name}"]
            if not abs(here - known) <= 0.01 * max(1, abs(known)):
                raise UserError(
                    f"export: the dev metric of '{source}' is {here:.4f} on these rows, and {known:.4f} in its report; "
                    "give the rows it was measured on"
                )
        copy_export(f"export: '{source}'", net, source, temporary)
        if choices.format == "hf":
            choices.check_drop(report)
            return report
        for path in temporary.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in PROGRAMS):
                path.unlink()
        for name in ("program", "certificate"):  # which exports of 0.2 have
            report.pop(name, None)
        _write_programs(report, net, data, temporary, choices)
        choices.check_drop(report)
        report["budget"] = _budget_again(report)
        write_report_and_card(temporary, report, read_task(data), net)
    return report


def _budget_again(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the field ``budget`` of an export that has another program; a speed-up was of the program before."""
    was = report.get("budget") or {}
    budget = parse_budget(was.get("asked"))
    if budget is None or budget.kind == "speedup":
        report.pop("speed", None)
        return None
    return budget.check(report, was.get("density") or report["compressed"]["density"])


def _write_programs(report: dict[str, Any], net: Model, data: DataModule, folder: Path, choices: Choices) -> None:
    """Write the program of an export that is asked for, if any; ``report`` gets ``program``."""
    if choices.format == "hf":
        return
    for _ in track([0], f"write and check {choices.format}"):
        made = report["program"] = write_program(net, data.tokenizer, folder, choices.format, task_type(data.record))
    if integers := choices.integers:
        for _ in track([0], "quantize and measure"):
            made |= quantize_program(folder, made, net, data, integers)


def write_tokenizer(data: DataModule, folder: Path, config: Config) -> None:
    """Write the tokenizer, and for a model of this ``config`` that gives vectors, the sentence-transformers' files."""
    tokenizer = copy.deepcopy(data.tokenizer)
    tokenizer.model_max_length = data.limit  # some say nothing, and truncation=True would cut nothing
    if task_type(data.record).cuts_ends:  # for programs that read the tokenizer's file alone
        tokenizer.backend_tokenizer.enable_truncation(data.deployed_length, direction=tokenizer.truncation_side)
    tokenizer.save_pretrained(folder)
    forget_code(folder)
    if task_type(data.record).pools:
        write_pooling(folder, config.hidden_size, data.deployed_length, data.record.pooling)
