"""Writing of an export: a folder that loads where this package is not installed."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.evaluation.continuation import continuations
from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.evaluation.intervals import FRACTIONS
from lit_compress.export.card import write_report_and_card
from lit_compress.export.certificate import Certificate
from lit_compress.export.check import check_export
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.fuse import MERGE, compact, fuse, merged, slower
from lit_compress.export.modelling import MODULE, refuses, write_model
from lit_compress.export.narrow import pad_widths
from lit_compress.export.number_format import cast, quantize_program
from lit_compress.export.program import read_program, write_program
from lit_compress.export.report import Measured, add_intervals, build_report
from lit_compress.export.sentences import write_sentences
from lit_compress.export.speed_asked import Programs, find_place, programs
from lit_compress.export.vocabulary import cut_vocabulary
from lit_compress.export.writing import write_writing
from lit_compress.models.accounting import dense_site_params, density
from lit_compress.models.budget import Budget
from lit_compress.models.own_code import forget_code
from lit_compress.models.shards import net_bytes
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.models.surgery import odd_widths, with_same_parameters
from lit_compress.models.vocabulary import shrink_table, table_bytes
from lit_compress.tasks import task_type
from lit_compress.utils.devices import accelerator_name
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, check_folder
from lit_compress.utils.memory import trim
from lit_compress.utils.progress import note, track

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.records import Task


def check_out(out: Path) -> None:
    """Refuse, before the work, a folder that cannot be written, or that holds something else than an export.

    Raises:
        UserError: it does.
    """
    check_folder("export", out)
    if out.exists() and any(out.iterdir()) and not (out / "structure.json").is_file():
        raise UserError(f"export: '{out}' holds something that is not an export; give an empty or new folder")


def read_task(data: DataModule) -> Task:
    """Return the task of ``data`` with the length that is read at most."""
    return replace(data.record, length=min(data.record.length, data.max_length))


@dataclass
class Export:
    """The exported model and data, and the fields of its report besides the measurements.

    Attributes:
        net: the model to export.
        before: stage -> model of that stage, with its metrics; the first is dense.
        method: name of the method.
        data: for the dev metric of the exported model.
        config: of the run.
        initial: dev metric before the last stage's first step; None if there is none.
        more: further fields of the report.
        budget: to check the export against, and the density that was to meet it; None for none.
        timed: times programs where its speed-up is measured; None: they are written again.
    """

    net: PreTrainedModel
    before: dict[str, Measured]
    method: str
    data: DataModule
    config: dict[str, Any]
    initial: float | None = None
    more: dict[str, Any] = field(default_factory=dict)
    budget: tuple[Budget, float] | None = None
    timed: Programs | None = None

    @property
    def dense(self) -> PreTrainedModel:
        """The model before compression."""
        return next(iter(self.before.values())).net


@dataclass
class _Fused:
    """The known figures of a model in the layers of its export."""

    data: DataModule  # read with the export's tokenizer
    kept: float  # density that the method kept
    merged: dict[str, float]  # matrices that are stored whole -> density that the method kept of them
    fields: dict[str, Any]  # of the report


def write_export(out: Path, source: Export, choices: Choices = AS_IS) -> dict[str, Any]:
    """Write a model, fused, as a folder that loads without this package; write and return its report.

    Args:
        out: folder to write; an earlier export there is replaced.
        source: has the model.
        choices: the user's.

    Raises:
        UserError: ``out`` has other files; a check fails; the model cannot have the choices.
    """
    choices.check()
    choices.check_net(source.net)
    choices.check_budget(source.budget and source.budget[0])
    check_out(out)
    task = read_task(source.data)
    with atomic_folder(out) as folder:
        certificate = Certificate(source.net, source.data, "train" if choices.vocabulary == "data" else "validation")
        net, fused = _fuse(source, choices, task.length)
        difference = _store(net, fused.data, folder, choices)
        del net  # the export takes its place in memory
        exported = load_net(folder)
        trim()
        same = choices.keeps_logits and not (fused.fields["vocabulary"] or {}).get("changed")
        form = {"file": "model.safetensors", "format": "hf"}
        certificate.compare(form, exported, fused.data, partial(certificate.answers, exported), same)
        report = _measure(source, fused, exported, folder, task)
        report |= fused.fields | {
            "export_difference": difference,
            "round_to": choices.round_to,
            "odd_widths": odd_widths(exported),
            "dtype": choices.dtype if choices.half else "float32",
            "ordinary": not (folder / f"{MODULE}.py").exists(),
            "refuses": refuses(exported),
            "merged": {
                "by": choices.merge, "above": MERGE, "sites": len(find_sites(exported)), "matrices": fused.merged,
            },
        }  # fmt: skip
        if report["odd_widths"] and accelerator_name():
            note(
                f"export: {report['odd_widths']} layers have widths or ranks that are no multiple of 8, slow on "
                "a GPU; compress with --model.round_to 8 (factorize: --round_to 8), 64 is better"
            )
        if report["embeddings"]:
            report["embeddings"]["bytes"] = table_bytes(load_net(folder, as_stored=True))
        write_programs(report, exported, fused.data, folder, choices, certificate, same)
        report["steps"] += _last_steps(report, choices)
        choices.check_drop(report)
        if source.budget and source.budget[0].kind == "speedup":
            report["speed"] = _speed(source, source.budget[0], report, exported, folder, choices)
        report["budget"] = source.budget and source.budget[0].check(report, source.budget[1])
        report |= source.more
        write_report_and_card(folder, report, task, exported)
    return report


def _fuse(source: Export, choices: Choices, length: int) -> tuple[PreTrainedModel, _Fused]:
    """Return the model as its export computes it, and the rest; ``length``: tokens at which layers are timed."""
    small, data, merges = compact(source.net), source.data, {}
    # an ordinary export of fewer blocks has a configuration of its own
    kept = density(small) * dense_site_params(small) / dense_site_params(source.dense)
    for_speed = source.budget is not None and source.budget[0].merges
    if choices.merge == "slower" and (for_speed or source.budget is None):
        merges = slower(small, length)
    elif choices.merge == "large" and for_speed:  # what is asked is what is stored, unless a speed is asked
        merges = merged(small)
    net, vocabulary, embeddings, steps = fuse(small, merges), None, None, []
    if choices.vocabulary == "data":
        steps.append(_step("shape", net, data))
        net, data, vocabulary = cut_vocabulary(net, data)
    if not choices.keeps_logits:
        steps.append(_step("vocabulary data" if vocabulary else "shape", net, data))
    if choices.embeddings:
        whole = table_bytes(net)
        embeddings = {"form": "int8", "error": shrink_table(net), "bytes": table_bytes(net), "of": whole}
    fields = {"vocabulary": vocabulary, "embeddings": embeddings, "steps": steps}
    return net, _Fused(data, kept, merges, fields)


def _step(name: str, net: PreTrainedModel, data: DataModule) -> dict[str, Any]:
    """Return the dev metric with its interval after a step of the export."""
    scores, key = evaluate(net, data, sure=True), f"val/{data.record.metrics[0]}"
    return {"step": name, "metric": scores[key], "interval": interval_of(scores, key)}


def _last_steps(report: dict[str, Any], choices: Choices) -> list[dict[str, Any]]:
    """Return the last step before the folder, and the program of integers if there is one, as :func:`_step`."""
    words = [f"embeddings {choices.embeddings}"] * bool(choices.embeddings)
    words += [f"dtype {report['dtype']}"] * choices.half
    name = ", ".join(words) or ("vocabulary data" if report["vocabulary"] else "shape")
    made = report.get("program") or {}
    models = {name: report["compressed"], **({f"{made['format']} {made['dtype']}": made} if "dtype" in made else {})}
    return [{"step": step} | {key: model[key] for key in ("metric", "interval")} for step, model in models.items()]


def _store(net: PreTrainedModel, data: DataModule, folder: Path, choices: Choices) -> float:
    """Write model and tokenizer; return the largest difference of the logits after loading in another process."""
    stored = net if choices.round_to is None else pad_widths(with_same_parameters(net), choices.round_to)
    if choices.half:
        cast(stored, choices.dtype)
    write_model(stored, folder)
    write_tokenizer(data, folder, net.config)
    for _ in track([0], "check the export in another process"):
        difference = check_export(load_net(folder) if choices.half else net, folder)
    return difference


def _measure(source: Export, fused: _Fused, exported: PreTrainedModel, folder: Path, task: Task) -> dict[str, Any]:
    """Return the report of all models, the export as the stage ``compressed``."""
    scores, key = evaluate(exported, fused.data, sure=True), f"val/{task.metrics[0]}"
    interval, size = interval_of(scores, key), net_bytes(folder)
    own = Measured(exported, size, scores[key], source.initial, fused.kept, bool(fused.merged), interval)
    nets = {**source.before, "compressed": own}
    report = build_report(task, source.method, nets, source.config)
    report["generation"] = continuations((source.dense, source.data), (exported, fused.data))
    report["metric"] |= {"rows": fused.data.validation_size(), "available": fused.data.available()[0]}
    intervals, first = {name: net.interval for name, net in nets.items()}, next(iter(nets))
    if own.interval and intervals[first] is None and task.metrics[0] not in FRACTIONS:
        intervals[first] = interval_of(evaluate(source.dense, source.data, sure=True), key)
    add_intervals(report, intervals)
    return report


def _speed(
    source: Export, budget: Budget, report: dict[str, Any], net: PreTrainedModel, folder: Path, choices: Choices
) -> dict[str, Any]:
    """Return the field ``speed`` of the report: the speed-up of the export's program over the dense model's."""
    made = folder / report["program"]["file"] if "program" in report else None
    with ExitStack() as stack:
        timed = source.timed
        if timed is None:
            place = find_place(budget, choices, source.dense, read_task(source.data).length)
            timed = stack.enter_context(programs(source.dense, source.data.tokenizer, place))
        gains = timed.gains_of_export(net, made)
    place = timed.place
    clock = "processor" if place.device == "cpu" else place.device
    dtype = place.choices.dtype if place.device == "cpu" else "bfloat16"
    return {
        "runtime": place.runtime,
        "device": place.device,
        "dtype": dtype,
        "threads": 1,
        "clock": clock,
        "shapes": gains,
    }


def write_programs(
    report: dict[str, Any],
    net: PreTrainedModel,
    data: DataModule,
    folder: Path,
    choices: Choices,
    certificate: Certificate,
    same: bool,
) -> None:
    """Write the program that is asked for, if any, and compare it; ``report`` gets ``program`` and ``certificate``.

    Args:
        report: of the export.
        net: as exported.
        data: of its task.
        folder: of the export.
        choices: have the format, and whether the program is of 8-bit integers.
        certificate: of the model before export; gets an entry.
        same: whether the program must answer as that model does.

    Raises:
        UserError: the program cannot be written, or differs.
    """
    if choices.format != "hf":
        for _ in track([0], f"write and check {choices.format}"):
            made = report["program"] = write_program(
                net, data.tokenizer, folder, choices.format, task_type(data.record)
            )
            if net.can_generate() and choices.format != "openvino":
                texts = certificate.inputs(net, data)
                made["writing"] = write_writing(net, folder, texts)
        if integers := choices.integers:
            for _ in track([0], "quantize and measure"):
                made |= quantize_program(folder, made, net, data, integers)
        run = read_program(folder / made["file"], tuple(made["outputs"]))
        form = {name: made[name] for name in ("file", "format")}
        certificate.compare(form, net, data, run, same and "dtype" not in made)
    report["certificate"] = certificate.entries


def write_tokenizer(data: DataModule, folder: Path, config: PreTrainedConfig) -> None:
    """Write the tokenizer, and for a model of this ``config`` that gives vectors, the files of sentence-transformers.

    Programs that read the tokenizer's file alone cut longer texts as the data does, if the end is cut.
    """
    tokenizer = copy.deepcopy(data.tokenizer)
    tokenizer.model_max_length = data.limit  # some say nothing, and truncation=True would cut nothing
    if task_type(data.record).cuts_ends:
        tokenizer.backend_tokenizer.enable_truncation(data.deployed_length, direction=tokenizer.truncation_side)
    tokenizer.save_pretrained(folder)
    forget_code(folder)
    write_sentences(folder, config, data)
