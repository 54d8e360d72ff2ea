"""Export of a net of which one block at a time is in memory: its files shard by shard, its metric block by block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.export.card import card
from lit_compress.export.choices import Choices
from lit_compress.export.folder import read_task, write_tokenizer
from lit_compress.export.fuse import MERGE
from lit_compress.export.modelling import write_form
from lit_compress.export.report import add_intervals, compared, reading_length
from lit_compress.models.accounting import count_params, dense_site_params, shape_flops
from lit_compress.models.block_net import BlockNet, empty
from lit_compress.models.shards import net_bytes, write_index, write_shard
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import save_form
from lit_compress.models.surgery import describe, factorize
from lit_compress.numerics.decompose import all_finite
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import write_json
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule
    from lit_compress.tasks.records import Task

Factors = Any  # stages/by_block.py: StoredFactors


def check_choices_by_block(choices: Choices) -> None:
    """Refuse what an export by blocks cannot have.

    Raises:
        UserError: names the first.
    """
    usual = Choices()
    for name in ("format", "round_to", "vocabulary", "embeddings", "pivot", "merge"):
        if getattr(choices, name) != getattr(usual, name):
            raise UserError(
                f"--by_block: --{name} {getattr(choices, name)} needs the whole net; leave it out, or ask for it with "
                "'export' where the net fits"
            )


def write_shards(
    net: BlockNet, form: PreTrainedModel, ranks: dict[str, int], stacks: Mapping[str, tuple[str, ...]],
    factors_of: Callable[[int], Factors], dtype: str, folder: Path, out: Path,
) -> None:  # fmt: skip
    """Write the factorized net, one file per block and one for the rest, with configuration and code.

    A block whose file is in ``folder`` already is not written again; ``out`` gets all when they are there.

    Args:
        net: gives the values of the dense net.
        form: the dense net without values; it gets factors, without values, too.
        ranks: of the matrices.
        stacks: first site -> all sites with one right factor.
        factors_of: function of a block's number that returns its factors.
        dtype: of the files.
        folder: for files that are finished; a killed process goes on from them.
        out: existing folder of the export.
    """
    kind, paths = getattr(torch, dtype), []
    for i, name in track(list(enumerate(net.names)), "write", len(net)):
        paths.append(folder / f"block-{i:05}.safetensors")
        own = {site: rank for site, rank in ranks.items() if site.startswith(f"{name}.")}
        block = form.get_submodule(name)
        if paths[-1].is_file():
            factorize(form, own, _shapes_only, stacks=stacks)
            continue
        net.fill(i, block)
        found = factors_of(i)
        with torch.no_grad():
            factorize(form, own, found.factors, bias_change=found.bias_change, stacks=stacks)
            del found
        _write(((f"{name}.{key}", value) for key, value in block.state_dict().items()), kind, paths[-1])
        empty(block)
    rest = folder / "rest.safetensors"
    with net.only_block():
        _write(((key, net.read(key)) for key in net.outside()), kind, rest)
    for path in (rest, *paths):
        _place(path, out / path.name)
    write_index(out, [out / path.name for path in (rest, *paths)])
    if dtype != "float32":
        form.config.dtype = kind
    write_form(form, out, save_form)


def _place(path: Path, there: Path) -> None:
    """Let a file have a second name, so that it is not made anew after a kill; copy it where that is not possible."""
    try:
        os.link(path, there)
    except OSError:
        shutil.copyfile(path, there)


def _shapes_only(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors without values."""
    return weight.new_empty(weight.shape[0], rank), weight.new_empty(rank, weight.shape[1])


def _write(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, path: Path) -> None:
    cast = {}
    for name, value in tensors:
        cast[name] = value.to(dtype) if value.is_floating_point() else value
        if value.is_floating_point() and not all_finite(cast[name]):
            raise UserError(f"export: --dtype {str(dtype)[6:]} cannot hold the values of '{name}'; nearest: bfloat16")
    partial = path.with_suffix(".partial")
    write_shard(cast, partial)
    partial.rename(path)


def entry(
    shapes: PreTrainedModel, task: Task, scores: dict[str, float], size: int, dense: PreTrainedModel | None = None
) -> dict[str, Any]:
    """Return what the report says of a net of which only shapes are known here.

    Args:
        shapes: the net, without values.
        task: of it.
        scores: its dev metrics.
        size: bytes of its files.
        dense: the net before, without values; None: this is it.
    """
    whole = dense_site_params(shapes)
    params = count_params(shapes)
    density, length = params.sites / whole, reading_length(shapes, task)
    operations = shape_flops(shapes if dense is None else dense, length)
    if operations is not None:  # every factor is a product per token, as every matrix was
        operations -= 2 * length * (whole - params.sites)
    return {
        "metric": scores[f"val/{task.metrics[0]}"], "initial": None, "density": density, "params": asdict(params),
        "flops": operations, "kept": density, "stored": density, "bytes": size,
        "latency_ms": {"median": None, "p10": None, "p90": None, "batch": 1, "length": length, "threads": 1},
    }  # fmt: skip


def write_report(
    out: Path, dense: PreTrainedModel, form: PreTrainedModel, scores: tuple[dict[str, float], dict[str, float]],
    size: int, method: str, data: DataModule, config: dict[str, Any], choices: Choices, more: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Write tokenizer, ``report.json`` and the card of an export whose tensors are there; return the report.

    What needs a whole net in memory is null: latencies, and the comparison after loading in another process.

    Args:
        out: folder of the export.
        dense: the dense net, without values.
        form: the export, without values.
        scores: of both, as :func:`~lit_compress.evaluation.evaluate.evaluate` returns them.
        size: bytes of the dense net's files.
        method: name of the method.
        data: of the task.
        config: of the command.
        choices: for the export.
        more: further fields of the report.
    """
    task = read_task(data)
    write_tokenizer(data, out)
    stages = {
        "dense": entry(dense, task, scores[0], size),
        "compressed": entry(form, task, scores[1], net_bytes(out), dense),
    }
    timing = {"rounds": 0, "spread": None, "steady": False, "speedup": None}
    report = compared(task, method, stages, timing, config)
    report["metric"] |= {"rows": data.validation_size(), "available": data.validation_available()}
    key = f"val/{task.metrics[0]}"
    ends = [scores[1][end] for end in (f"{key}_low95", f"{key}_high95") if end in scores[1]]
    add_intervals(report, ends or None)
    report |= {
        "export_difference": None, "round_to": None, "pivot": None, "vocabulary": None, "embeddings": None,
        "dtype": choices.dtype, "ordinary": False, "refuses": bool(describe(form)), "certificate": [], "budget": None,
        "generation": None,
        "merged": {"by": choices.merge, "above": MERGE, "sites": len(find_sites(form)), "matrices": {}},
    }  # fmt: skip
    report |= more
    write_json(out / "report.json", report)
    (out / "README.md").write_text(card(report, task, factors=True))
    return report
