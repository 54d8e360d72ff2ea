"""The dev metrics of a net outside training, by a plain loop on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lit_compress.metrics import build_metrics
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
        splits = [("test", data.test_dataloader())]
    else:
        names = ["val", *(name.replace("validation", "val") for name in data.record.validation[1:])]
        splits = list(zip(names, data.val_dataloader(), strict=False))
    values: dict[str, float] = {}
    for prefix, loader in splits:
        metrics = build_metrics(data.record)
        for metric in metrics.values():
            metric.distributed_available_fn = lambda: False  # this process sees every row; others may be gone
        for batch in track(loader, "evaluate", len(loader)):
            inputs = {k: v.to(device) for k, v in batch.items() if k not in ("labels", "index")}
            with torch.inference_mode():
                metrics.update(net(**inputs).logits.float().cpu(), batch["labels"])
        values |= {f"{prefix}/{name}": float(value) for name, value in metrics.compute().items()}
    net.to("cpu")
    return values


def constant_score(data: DataModule) -> float:
    """Return the main dev metric of the best constant answer: the majority class's accuracy, 0 for correlations."""
    record = data.record
    labels = torch.cat([batch["labels"] for batch in data.val_dataloader()[0]])
    scores = []
    for answer in range(record.num_labels):
        metric = build_metrics(record)[record.metrics[0]]
        metric.distributed_available_fn = lambda: False
        logits = torch.nn.functional.one_hot(torch.full((len(labels),), answer), record.num_labels).float()
        metric.update(logits, labels)
        scores.append(float(metric.compute()))
    return max(scores)
