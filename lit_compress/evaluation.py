"""The dev metrics of a net outside training, by a plain loop on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lit_compress.kinds import kind_of
from lit_compress.metrics import bind, build_metrics
from lit_compress.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def evaluate(
    net: PreTrainedModel, data: DataModule, stage: Literal["validate", "test"] = "validate"
) -> dict[str, float]:
    """Return ``val/<metric>`` of ``net`` on every validation split, as a fit logs them; or ``test/<metric>``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = net.to(device).eval()
    if stage == "test":
        splits, rows = [("test", data.test_dataloader())], [data.test_rows]
    else:
        names = ["val", *(name.replace("validation", "val") for name in data.record.validation[1:])]
        splits, rows = list(zip(names, data.val_dataloader(), strict=False)), data.validation_rows
    values: dict[str, float] = {}
    kind = kind_of(data.record)
    for (prefix, loader), texts in zip(splits, rows, strict=True):
        metrics = build_metrics(data.record)
        bind(metrics, texts)
        for metric in metrics.values():
            metric.distributed_available_fn = lambda: False  # this process sees every row; others may be gone
        for batch in track(loader, "evaluate", len(loader)):
            with torch.inference_mode():
                moved = {name: column.to(device) for name, column in batch.items()}
                outputs = kind.outputs(net, moved, data.tokenizer)
                kind.observe(metrics, outputs.cpu(), batch)
        values |= {f"{prefix}/{name}": float(value) for name, value in metrics.compute().items()}
    net.to("cpu")
    return values


def constant_score(data: DataModule) -> float:
    """Return the main dev metric of the best constant answer: the majority class's accuracy, 0 for correlations.

    0 too where a constant answer has no meaning (the kind has no ``constants``).
    """
    record = data.record
    scores = [0.0]
    if constants := kind_of(record).constants(record):
        labels = torch.cat([batch["labels"] for batch in data.val_dataloader()[0]])
    for outputs in constants:
        metric = build_metrics(record)[record.metrics[0]]
        metric.distributed_available_fn = lambda: False
        metric.update(outputs.expand(len(labels), -1), labels)
        scores.append(float(metric.compute()))
    return max(scores)
