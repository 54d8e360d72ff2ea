"""What is done to a fine-tuned model at once, without training: factorize and export it, analyze it."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from lit_compress.analysis import truncation
from lit_compress.analysis.plots import write_rows
from lit_compress.analysis.truncation import Rows
from lit_compress.backbones import load_finetuned
from lit_compress.decompose import Axis
from lit_compress.errors import UserError, nearest
from lit_compress.evaluation import evaluate
from lit_compress.export.folder import write_export
from lit_compress.export.report import Measured
from lit_compress.methods.fwsvd import FWSVD, Weighted, fisher_of, weigh
from lit_compress.methods.low_rank_stage import WeightedDecomposer
from lit_compress.surgery import factorize, load_net, save_net

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def is_compressed(folder: Path) -> bool:
    """Say whether the net in ``folder`` has layers in the place of its Linears."""
    structure = folder / "structure.json"
    return structure.is_file() and structure.read_text().strip() != "{}"


def load_model(name: str, method: FWSVD) -> PreTrainedModel:
    """Load a net that was fine-tuned on the method's task.

    Raises:
        UserError: it is a run, factorized already, or not fine-tuned on the task.
    """
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file():
        raise UserError(f"model: '{name}' is a run, not a model; give one of its nets, e.g. {folder / 'dense/net'}")
    if is_compressed(folder):
        raise UserError(f"model: '{name}' is compressed already; give the net it was made from")
    return load_finetuned(name, method.task_record)


def decomposers(
    method: FWSVD, net: PreTrainedModel, data: DataModule, settings: Sequence[Weighted]
) -> list[WeightedDecomposer]:
    """Return how each of ``settings`` takes ``net`` apart; one Fisher pass over the training data serves them all.

    Raises:
        UserError: there are no scores, or no usable gradients.
    """
    fisher = {}
    if any(s.weighting == "fisher" for s in settings):
        net.to("cuda" if torch.cuda.is_available() else "cpu")
        batches = data.calibration_dataloader(method.retrain.fisher_examples)
        fisher = fisher_of(net, method.task_record, batches, settings)
        net.to("cpu")
    folder = Path(method.backbone).expanduser()
    return [weigh(s, fisher, folder) for s in settings]


def factorize_model(out: Path, method: FWSVD, data: DataModule, config: dict[str, Any]) -> dict[str, Any]:
    """Factorize the method's backbone, export it to ``out`` and return the report.

    Args:
        out: folder to write.
        method: names the model (``backbone``), the task, the weighting and the ranks.
        data: training data for a Fisher weighting, validation data for the report.
        config: of the command.

    Raises:
        UserError: the model, the data or ``out`` cannot be used.
    """
    dense = load_model(method.backbone, method)
    method.ranks.check(dense)
    (decomposer,) = decomposers(method, dense, data, [method.retrain])
    net = copy.deepcopy(dense)
    factorize(net, method.ranks.allocate(net, decomposer.sigma), decomposer.factors)
    metric = evaluate(dense, data)[f"val/{data.record.metrics[0]}"]
    with tempfile.TemporaryDirectory() as work:
        save_net(dense, Path(work))
        before = {"dense": Measured(dense, Path(work), metric)}
        return write_export(out, net, before, type(method).__name__, data, config)


KINDS = ("truncation", "sweep", "spectra", "ranks")
RATIOS = tuple(i / 10 for i in range(1, 11))


def weighting_of(label: str, like: Weighted) -> Weighted:
    """Return the settings called ``label``: ``none``, or weighting and axis as in ``fisher-in``.

    Raises:
        UserError: there is no such weighting.
    """
    valid = ["none", *(f"fisher-{axis}" for axis in get_args(Axis)), "importance-out"]
    if label not in valid:
        raise UserError(f"weightings: unknown '{label}'; {nearest(label, valid)}")
    weighting, _, axis = label.partition("-")
    return replace(like, weighting=weighting, axis=axis or "in")


def analyze_model(
    kind: str,
    out: Path,
    method: FWSVD,
    data: DataModule,
    weightings: Sequence[str] = ("none", "fisher-in"),
    ratios: Sequence[float] = RATIOS,
) -> Rows:
    """Measure what truncation does to the method's backbone and write table and figure to ``out``.

    Args:
        kind: one of :data:`KINDS`.
        out: folder to write.
        method: names the model, the task and the Fisher settings.
        data: training data for Fisher weightings, validation data for the dev metric.
        weightings: labels as :func:`weighting_of` takes them.
        ratios: of the ranks, for ``sweep``.

    Raises:
        UserError: the model, the data or a weighting cannot be used.
    """
    if out.exists() and any(out.iterdir()) and not any((out / f"{k}.csv").is_file() for k in KINDS):
        raise UserError(f"analyze: '{out}' holds something that is not an analysis; give an empty or new folder")
    settings = [weighting_of(label, method.retrain) for label in weightings]
    if kind == "ranks":
        folder = Path(method.backbone).expanduser()
        compressed = is_compressed(folder)
        rows = truncation.ranks(load_net(folder) if compressed else load_model(method.backbone, method))
    else:
        net = load_model(method.backbone, method)
        found = dict(zip(weightings, decomposers(method, net, data, settings), strict=True))
        key = f"val/{data.record.metrics[0]}"

        def metric(net: PreTrainedModel) -> float:
            return evaluate(net, data)[key]

        if kind == "truncation":
            rows = truncation.grouped_truncation(net, found, metric)
        elif kind == "sweep":
            rows = truncation.rank_ratio_sweep(net, found, metric, ratios)
        else:
            rows = truncation.spectra(net, found)
    write_rows(kind, rows, out)
    return rows
