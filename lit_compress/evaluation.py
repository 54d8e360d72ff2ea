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
