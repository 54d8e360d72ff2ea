"""Evaluation of a model outside training, by a loop over the batches on one device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import torch

from lit_compress.evaluation.intervals import Interval, intervals, standard_error
from lit_compress.evaluation.metrics import CORRELATIONS, bind, build_metrics
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, move, to_device
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import MetricCollection
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def outputs_of(
    net: PreTrainedModel, data: DataModule, batches: Iterable[dict[str, Tensor]], count: int, what: str
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield ``count`` batches, each with the outputs of ``net`` on the CPU; the model stays on this process's device.

    ``what`` is the name of the progress bar.
    """
    device, kind = current_device(), task_type(data.record)
    net = move(net, device).eval()
    for batch in track(batches, what, count):
        with torch.inference_mode():
            outputs = kind.outputs(net, to_device(batch, device), data.tokenizer).cpu()
        yield batch, outputs


def evaluate(
    net: PreTrainedModel, data: DataModule, stage: Literal["validate", "test"] = "validate", sure: bool = False
) -> dict[str, float]:
    """Return ``val/<metric>`` of ``net`` on every validation split, as a fit logs them; or ``test/<metric>``.

    Args:
        net: on any device; it is on the CPU afterwards.
        data: of its task.
        stage: whose splits.
        sure: also return, per split, ``<split>/rows``; ``<split>/available``, of how many, if they are not one text;
            and the ends of every score's interval (evaluation/intervals.py), ``<split>/<metric>_low95`` and
            ``..._high95``.
    """
    names = ["val", *(name.replace("validation", "val") for name in data.record.validation[1:])]
    test = stage == "test"
    splits = zip(["test"] if test else names, [data.test_dataloader()] if test else data.val_dataloader(), strict=False)
    values: dict[str, float] = {}
    kind = task_type(data.record)
    for prefix, loader in splits:
        metrics, texts = build_metrics(data.record, alone=True), loader.dataset.rows
        bind(metrics, texts)
        for batch, outputs in outputs_of(net, data, loader, len(loader), "evaluate"):
            kind.observe(metrics, outputs, batch)
        scores = {name: float(value) for name, value in metrics.compute().items()}
        if sure:
            count, available = len(loader.dataset if kind.one_text else texts), loader.dataset.available
            bounds = intervals(metrics, scores, count)
            scores |= {"rows": count} | ({} if available is None else {"available": available})
            for name, (low, high) in bounds.items():
                scores |= {f"{name}_low95": low, f"{name}_high95": high}
        values |= {f"{prefix}/{name}": value for name, value in scores.items()}
    move(net, "cpu")
    return values


def interval_of(scores: Mapping[str, float], name: str) -> Interval | None:
    """Return the interval of a score of :func:`evaluate` with ``sure``; None if it has none."""
    low, high = (scores.get(f"{name}_{end}") for end in ("low95", "high95"))
    return None if low is None or high is None else (low, high)


def constant_answer(data: DataModule) -> dict[str, float]:
    """Return ``constant``, the first dev metric of the best constant answer, e.g. the majority class; and its error.

    It is 0 for correlations, and if constant answers make no sense. ``constant_error`` is the standard error of a model
    that knows no more, on so many rows.
    """
    record, kind = data.record, task_type(data.record)
    name, best, error = record.metrics[0], 0.0, 0.0
    if constants := kind.constants(record):
        labels = torch.cat([batch["labels"] for batch in data.val_dataloader()[0]])
    for outputs in constants:
        metrics = build_metrics(record, alone=True)
        kind.observe(metrics, outputs.expand(len(labels), *outputs.shape[1:]), {"labels": labels})
        score = float(metrics.compute()[name])
        if score > best or not error:
            best, error = score, _error_of_chance(metrics, name, score, len(labels))
    return {"constant": best, "constant_error": error}


def _error_of_chance(metrics: MetricCollection, name: str, score: float, rows: int) -> float:
    """Return the standard error of a score of ``rows`` rows if the answers do not depend on the texts."""
    if name == "matthews" or name in CORRELATIONS:  # a constant's is 0 in every sample, a random answer's is not
        return (max(rows, 2) - 1) ** -0.5
    bounds = intervals(metrics, {name: score}, rows)
    return standard_error(bounds[name]) if name in bounds else 0.0
