"""Predictions of a net as JSON lines: the text columns and the answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.kinds import kind_of
from lit_compress.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def write_predictions(net: PreTrainedModel, data: DataModule, path: Path) -> int:
    """Predict every row of the ``test`` split (``validation`` if there is none), in the order of the file.

    A line holds the text columns and what the kind of the task answers: ``label`` and ``probability``, ``score``, ...

    Returns:
        The number of lines written to ``path``, which appears only when complete.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = net.to(device).eval()
    loader = data.predict_dataloader()
    task, kind, texts = data.record, kind_of(data.record), data.prediction_texts
    found: dict[int, list[Any]] = {number: [] for number in range(len(texts))}
    for batch in track(loader, "predict", len(loader)):
        with torch.inference_mode():
            moved = {name: column.to(device) for name, column in batch.items()}
            outputs = kind.outputs(net, moved, data.tokenizer).cpu()
        for number, piece in kind.pieces(task, outputs, batch):
            found[number].append(piece)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for number, row in enumerate(texts):
            shown = {name: value for name, value in row.items() if name != task.label}
            file.write(json.dumps({**shown, **kind.answer(task, row, found[number])}, ensure_ascii=False) + "\n")
    os.replace(temporary, path)
    return len(texts)
