"""Evaluation of a model outside training, by a loop over the batches on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from lit_compress.evaluation.chance import Constant
from lit_compress.evaluation.intervals import Interval, intervals, standard_error
from lit_compress.evaluation.metrics import COEFFICIENTS, bind, build_metrics
from lit_compress.tasks import task_type
from lit_compress.utils.devices import current_device, move, to_device
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from torchmetrics import MetricCollection
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


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
    device = current_device()
    net = move(net, device).eval()
    names = ["val", *(name.replace("validation", "val") for name in data.record.validation[1:])]
    if stage == "test":
        splits = [("test", data.test_dataloader())]
    else:
        splits = list(zip(names, data.val_dataloader(), strict=False))
    values: dict[str, float] = {}
    kind = task_type(data.record)
    for prefix, loader in splits:
        metrics, texts = build_metrics(data.record, alone=True), loader.dataset.rows
        bind(metrics, texts)
        for batch in track(loader, "evaluate", len(loader)):
            with torch.inference_mode():
                moved = to_device(batch, device)
                outputs = kind.outputs(net, moved, data.tokenizer)
                kind.observe(metrics, outputs.cpu(), batch)
        scores = {name: float(value) for name, value in metrics.compute().items()}
        if sure:
            count, available = len(loader.dataset if kind.one_text else texts), loader.dataset.available
            bounds = intervals(metrics, scores, count).items()
            scores |= {"rows": count}
            for name, (low, high) in bounds:
                scores |= {f"{name}_low95": low, f"{name}_high95": high}
            scores |= {} if available is None else {"available": available}
        values |= {f"{prefix}/{name}": value for name, value in scores.items()}
    move(net, "cpu")
    return values


def interval_of(scores: Mapping[str, float], name: str) -> Interval | None:
    """Return the interval of a score of :func:`evaluate` with ``sure``; None if it has none."""
    low, high = (scores.get(f"{name}_{end}") for end in ("low95", "high95"))
    return None if low is None or high is None else (low, high)


def constant_answer(data: DataModule) -> Constant:
    """Return the score of the best constant answer on the first dev split."""
    record, kind = data.record, task_type(data.record)
    name, best = record.metrics[0], Constant(0.0)
    if constants := kind.constants(record):
        labels = torch.cat([batch["labels"] for batch in data.val_dataloader()[0]])
    for outputs in constants:
        metrics = build_metrics(record, alone=True)
        kind.observe(metrics, outputs.expand(len(labels), *outputs.shape[1:]), {"labels": labels})
        score = float(metrics.compute()[name])
        if score > best.score or not best.error:
            best = Constant(score, _error_of_chance(metrics, name, score, len(labels)))
    return best


def _error_of_chance(metrics: MetricCollection, name: str, score: float, rows: int) -> float:
    """Return the standard error of a score of ``rows`` rows if the answers do not depend on the texts."""
    if name == "matthews" or name in COEFFICIENTS:  # a constant's is 0 in every sample, a random answer's is not
        return (max(rows, 2) - 1) ** -0.5
    bounds = intervals(metrics, {name: score}, rows)
    return standard_error(bounds[name]) if name in bounds else 0.0
