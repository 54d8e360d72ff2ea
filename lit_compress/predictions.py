"""Predictions of a net as JSON lines: text, label, probability."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def write_predictions(net: PreTrainedModel, data: DataModule, path: Path) -> int:
    """Predict every row of the ``test`` split (``validation`` if there is none), in the order of the file.

    Classification lines hold the text columns, ``label`` and ``probability`` of that label; regression lines
    hold the text columns and ``score``.

    Returns:
        The number of lines written to ``path``, which appears only when complete.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = net.to(device).eval()
    loader = data.predict_dataloader()
    logits: dict[int, torch.Tensor] = {}
    for batch in track(loader, "predict", len(loader)):
        inputs = {k: v.to(device) for k, v in batch.items() if k not in ("labels", "index")}
        with torch.inference_mode():
            found = net(**inputs).logits.float().cpu()
        logits |= {i: row for i, row in zip(batch["index"].tolist(), found, strict=True) if i >= 0}
    texts = data.prediction_texts
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for index in sorted(logits):
            file.write(json.dumps({**texts[index], **_answer(data, logits[index])}, ensure_ascii=False) + "\n")
    os.replace(temporary, path)
    return len(logits)


def _answer(data: DataModule, logits: torch.Tensor) -> dict[str, Any]:
    if data.record.kind == "regression":
        return {"score": float(logits)}
    probability, label = logits.softmax(-1).max(-1)
    return {"label": data.record.labels[int(label)], "probability": float(probability)}
