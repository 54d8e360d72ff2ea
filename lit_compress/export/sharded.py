"""Export of a model with one block at a time in memory: one file per block, and a report of what shapes say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.evaluation.evaluate import constant_answer, interval_of
from lit_compress.export.card import write_report_and_card
from lit_compress.export.choices import Choices
from lit_compress.export.folder import layer_facts, read_task, write_tokenizer
from lit_compress.export.modelling import hand_over, ordinary_form, write_form
from lit_compress.export.report import add_intervals, compared, reading_length
from lit_compress.models.accounting import count_params, dense_site_params, shape_flops
from lit_compress.models.block_net import BlockNet, empty
from lit_compress.models.shards import net_bytes, write_index, write_shard
from lit_compress.models.storage import save_form
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.models.budget import Budget

Change = Callable[["PreTrainedModel", int, bool], None]


def check_choices_by_block(choices: Choices) -> None:
    """Refuse choices that an export by blocks cannot have.

    Raises:
        UserError: names the first.
    """
    usual = Choices()
    for name in ("format", "vocabulary", "embeddings", "merge"):
        if getattr(choices, name) != getattr(usual, name):
            raise UserError(
                f"--by_block: --{name} {getattr(choices, name)} needs the whole model; leave it out, or pass it to "
                "'export' where the model fits"
            )


def write_shards(
    net: BlockNet, form: PreTrainedModel, change: Change, dtype: str, out: Path,
    refine: Callable[[int, nn.Module], None] | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Write the compressed model, one file per block and one for the rest, with configuration and code.

    A block whose file is there already is not written again, so a killed process continues with the next one.

    Args:
        net: gives the values of the dense model.
        form: the dense model without values; its blocks are changed.
        change: function of a model like ``form``, the number of a block, and whether it has values, that compresses
            this block in place.
        dtype: of the files.
        out: folder of the export.
        refine: trains a changed block, of a number, before it is written.

    Returns:
        The model of the export, without values.
    """
    out.mkdir(exist_ok=True)
    rest, *paths = (out / f"model-{i + 1:05}-of-{len(net) + 1:05}.safetensors" for i in range(len(net) + 1))
    kind, small = getattr(torch, dtype), copy.deepcopy(form)
    for i in range(len(net)):
        change(small, i, False)
    ordinary = ordinary_form(small)
    for i, name in track(list(enumerate(net.names)), "write", len(net)):
        if paths[i].is_file():
            continue
        block = form.get_submodule(name)
        net.fill(i, block)
        with torch.no_grad():
            change(form, i, True)
        if refine is not None:
            refine(i, block)
        if ordinary is not None:
            block, changed = ordinary.get_submodule(name), block
            hand_over(changed, block)
            empty(changed)
        _write(((f"{name}.{key}", value) for key, value in block.state_dict().items()), kind, paths[i])
        empty(block)
    with net.only_block():
        _write(((key, net.read(key)) for key in net.outside()), kind, rest)
    write_index([rest, *paths])
    made = small if ordinary is None else ordinary
    if dtype != "float32":
        made.config.dtype = kind
    if ordinary is None:
        write_form(made, out, save_form)
    else:
        made.config.architectures = [type(made).__name__]
        save_form(made, out)
    return made


def _write(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, path: Path) -> None:
    """Write a file in ``dtype``, which must hold all values."""
    cast = {}
    for name, value in tensors:
        cast[name] = value.to(dtype) if value.is_floating_point() else value
        if value.is_floating_point() and not all_finite(cast[name]):
            raise UserError(f"export: --dtype {str(dtype)[6:]} cannot hold the values of '{name}'; nearest: bfloat16")
    partial = path.with_suffix(".partial")
    write_shard(cast, partial)
    partial.rename(path)


def write_report(
    out: Path, dense: PreTrainedModel, form: PreTrainedModel, scores: tuple[dict[str, float], dict[str, float]],
    size: int, method: str, data: DataModule, config: dict[str, Any], choices: Choices, more: dict[str, Any],
    budget: tuple[Budget, float] | None,
) -> dict[str, Any]:  # fmt: skip
    """Write tokenizer, ``report.json`` and the card of an export whose tensors are there; return the report.

    Numbers that need the whole model in memory are null: latencies, and the comparison after loading in another
    process.

    Args:
        out: folder of the export.
        dense: the dense model, without values.
        form: the export, without values.
        scores: of both, as :func:`~lit_compress.evaluation.evaluate.evaluate` returns them.
        size: bytes of the dense model's files.
        method: name of the method.
        data: of the task.
        config: of the command.
        choices: for the export.
        more: further fields of the report.
        budget: to check the export against, and the density that was to meet it; None for none.
    """
    task = read_task(data)
    write_tokenizer(data, out, form.config)
    key, length, whole = f"val/{task.metrics[0]}", reading_length(dense, task), dense_site_params(dense)
    stages = {}
    both = (("dense", dense, size), ("compressed", form, net_bytes(out)))
    for (name, shapes, stored), metrics in zip(both, scores, strict=True):
        params = count_params(shapes)
        stages[name] = {
            "metric": metrics[key], "initial": None, "params": asdict(params), "flops": shape_flops(shapes, length),
            **dict.fromkeys(("density", "kept", "stored"), params.sites / whole), "bytes": stored,
            "latency_ms": {"median": None, "p10": None, "p90": None, "batch": 1, "length": length, "threads": 1},
        }  # fmt: skip
    timing = {"rounds": 0, "spread": None, "steady": False, "speedup": None}
    report = compared(task, method, stages, timing, config)
    report["metric"] |= {"rows": scores[0]["val/rows"], "available": scores[0].get("val/available")}
    add_intervals(report, {name: interval_of(metrics, key) for name, metrics in zip(stages, scores, strict=True)})
    report |= {
        "export_difference": None, "vocabulary": None, "embeddings": None,
        "budget": budget and budget[0].check(report, budget[1]), **layer_facts(form, out, choices, {}),
        **constant_answer(data).fields, **more,
    }  # fmt: skip
    choices.check_drop(report)
    write_report_and_card(out, report, task, form)
    return report
