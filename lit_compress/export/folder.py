"""Writing of an export: a folder that loads where this package is not installed."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.evaluation.continuation import continuations
from lit_compress.evaluation.evaluate import evaluate, interval_of
from lit_compress.evaluation.intervals import FRACTIONS
from lit_compress.export.card import write_report_and_card
from lit_compress.export.certificate import Certificate, answers
from lit_compress.export.check import check_export
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.embeddings import shrink_embeddings, table_bytes
from lit_compress.export.fuse import MERGE, compact, fuse, merged, slower
from lit_compress.export.modelling import MODULE, write_model
from lit_compress.export.narrow import pad_widths
from lit_compress.export.number_format import cast, quantize_program
from lit_compress.export.pivot import check_pivot, to_pivot_form
from lit_compress.export.program import read_program, write_program
from lit_compress.export.report import Measured, add_intervals, build_report
from lit_compress.export.sentences import write_sentences
from lit_compress.export.vocabulary import cut_vocabulary
from lit_compress.export.writing import write_writing
from lit_compress.models.accounting import dense_site_params, density
from lit_compress.models.budget import Budget
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.tasks import task_type
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, check_folder
from lit_compress.utils.memory import trim
from lit_compress.utils.progress import track

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


def write_export(
    out: Path,
    net: PreTrainedModel,
    before: dict[str, Measured],
    method: str,
    data: DataModule,
    config: dict[str, Any],
    initial: float | None = None,
    choices: Choices = AS_IS,
    facts: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    budget: tuple[Budget, float] | None = None,
) -> dict[str, Any]:
    """Write ``net``, fused, as a folder that loads without this package; write and return its report.

    Args:
        out: folder to write; an earlier export there is replaced.
        net: the net to export.
        before: stage -> net of that stage, with its metrics; the first is dense.
        method: name of the method.
        data: for the dev metric of the exported net.
        config: of the run.
        initial: dev metric before the last stage's first step; None if there is none.
        choices: what the user asked for.
        facts: what was found in the data, if that is known.
        more: further fields of the report.
        budget: to check the export against, and the density that was to meet it; None for none.

    Raises:
        UserError: ``out`` has other files; a check fails; what was asked for cannot be done with ``net``.
    """
    choices.check()
    choices.check_net(net)
    choices.check_budget(budget and budget[0])
    check_out(out)
    task = read_task(data)
    with atomic_folder(out) as temporary:
        certificate = Certificate(net, data, "train" if choices.vocabulary == "data" else "validation")
        small = compact(net)
        if choices.pivot:
            check_pivot(small)
        saved = to_pivot_form(small) if choices.pivot else {}
        merges = choices.merge != "never" and (budget is None or budget[0].merges)
        # an ordinary export of fewer blocks has a configuration of its own
        kept, dense = density(small) * dense_site_params(small) / dense_site_params(next(iter(before.values())).net), {}
        if merges:
            dense = slower(small, task.length) if choices.merge == "slower" else merged(small)
        net, vocabulary, embeddings, given = fuse(small, dense), None, None, data
        del small
        if choices.vocabulary == "data":
            net, data, vocabulary = cut_vocabulary(net, data)
        if choices.embeddings:
            embeddings = shrink_embeddings(net, data, choices.embeddings, choices.rank)
        stored = net if choices.round_to is None else pad_widths(copy.deepcopy(net), choices.round_to)
        if choices.half:
            cast(stored, choices.dtype)
        write_model(stored, temporary)
        write_tokenizer(data, temporary, net.config)
        for _ in track([0], "check the export in another process"):
            difference = check_export(load_net(temporary) if choices.half else net, temporary)
        exported = load_net(temporary, as_stored=True)
        trim()
        same = choices.keeps_logits and not (vocabulary and vocabulary["changed"])
        form = {"file": "model.safetensors", "format": "hf"}
        certificate.compare(form, exported, data, partial(answers, exported), same)
        if embeddings is not None:
            embeddings["bytes"] = table_bytes(exported)
        scores, key = evaluate(exported, data, sure=True), f"val/{task.metrics[0]}"
        own = Measured(exported, temporary, scores[key], initial, kept, bool(dense), interval_of(scores, key))
        nets = {**before, "compressed": own}
        report = build_report(task, method, nets, config)
        report["generation"] = continuations((next(iter(before.values())).net, given), (exported, data))
        report["metric"] |= {"rows": data.validation_size(), "available": data.validation_available()}
        ends, dense_name = {name: one.interval for name, one in nets.items()}, next(iter(nets))
        if own.interval and ends[dense_name] is None and task.metrics[0] not in FRACTIONS:
            ends[dense_name] = interval_of(evaluate(nets[dense_name].net, given, sure=True), key)
        add_intervals(report, ends)
        if facts is not None:
            report["data"] = facts
        report["export_difference"] = difference
        report["round_to"] = choices.round_to
        pivots = {name: count for name, count in saved.items() if name not in dense}
        report |= {"pivot": pivots if choices.pivot else None, "vocabulary": vocabulary, "embeddings": embeddings}
        report["dtype"] = choices.dtype if choices.half else "float32"
        report["ordinary"] = not (temporary / f"{MODULE}.py").exists()
        report["refuses"] = bool(getattr(exported.config, "structure", None))
        report["merged"] = {
            "by": choices.merge, "above": MERGE, "sites": len(find_sites(net)), "matrices": dense,
        }  # fmt: skip
        write_programs(report, exported, data, temporary, choices, certificate, same)
        report["budget"] = budget and budget[0].check(report, budget[1])
        report |= more or {}
        write_report_and_card(temporary, report, task, net)
    return report


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
        certificate: of the net before export; gets an entry.
        same: whether the program must answer as that net does.

    Raises:
        UserError: the program cannot be written, or differs.
    """
    if choices.format != "hf":
        for _ in track([0], f"write and check {choices.format}"):
            made = report["program"] = write_program(net, data.tokenizer, folder, choices.format)
            if net.can_generate() and choices.format != "openvino":
                texts = certificate.inputs(net, data)
                made["writing"] = write_writing(net, folder, choices.format, texts)
        if choices.dtype == "int8":
            for _ in track([0], "quantize and measure"):
                made |= quantize_program(folder, net, data)
        run = read_program(folder / made["file"], tuple(made["outputs"]))
        form = {name: made[name] for name in ("file", "format")}
        certificate.compare(form, net, data, run, same and "dtype" not in made)
    report["certificate"] = certificate.entries


def write_tokenizer(data: DataModule, folder: Path, config: PreTrainedConfig) -> None:
    """Write the tokenizer, and for a net that gives vectors, of this ``config``, what sentence-transformers reads.

    Programs that read the tokenizer's file alone end longer texts where the data ends them, if the end is what goes.
    """
    tokenizer = copy.deepcopy(data.tokenizer)
    tokenizer.model_max_length = data.limit  # some say nothing, and truncation=True would cut nothing
    if task_type(data.record).cuts_ends:
        tokenizer.backend_tokenizer.enable_truncation(data.deployed_length, direction=tokenizer.truncation_side)
    tokenizer.save_pretrained(folder)
    write_sentences(folder, config, data)
