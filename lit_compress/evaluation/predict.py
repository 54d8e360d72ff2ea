"""A model's answers: as JSON lines, with ids, text columns and the given label; on the dev set, next to another's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.data.batching import PaddedBatches
from lit_compress.data.checks import KEPT
from lit_compress.evaluation.evaluate import outputs_of
from lit_compress.tasks import task_type
from lit_compress.utils.devices import move
from lit_compress.utils.files import atomic_file

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule


def write_predictions(net: PreTrainedModel, data: DataModule, path: Path) -> tuple[int, int | None]:
    """Predict every row of the ``test`` split (``validation`` if there is none), in the order of the file.

    A line holds the row's ``id`` and ``idx``, its text columns, ``given``, the label that is in the file, each if
    there is one, and the answer of the task's type: ``label`` and ``probability``, ``score``, ...

    Returns:
        The number of lines written to ``path``, which appears only when complete; and of how many, None for one text.
    """
    loader, task, kind = data.predict_dataloader(), data.record, task_type(data.record)
    texts = loader.dataset.rows
    by_row = _by_row(data, outputs_of(net, data, loader, len(loader), "predict"), len(texts))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number, row in enumerate(texts):
            line = {**_shown(row), **kind.answer(task, row, by_row[number])}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return len(texts), loader.dataset.available


def answers(nets: Sequence[tuple[PreTrainedModel, DataModule]]) -> list[dict[str, Any]]:
    """Return the first rows of the dev set: text columns, ``given`` label and the models' answers, ``answers``.

    At most 2,000 rows; 50 where texts are written; none where the rows are one text, or the answers only vectors.

    Args:
        nets: each with the data as its own tokenizer reads it; models share it only if they have the same tokens.
    """
    data = nets[0][1]
    task, kind = data.record, task_type(data.record)
    if task.wants_vectors or not kind.answered or not len(rows := data.val_dataloader()[0].dataset.rows):
        return []
    rows = rows.select(range(min(kind.answered, len(rows))))
    by_net = []
    for net, read in nets:
        inputs, order = _inputs(read.val_dataloader()[0].dataset, len(rows))
        parts = [order[i : i + read.eval_rows] for i in range(0, len(order), read.eval_rows)]
        outputs = outputs_of(net, read, (inputs[part] for part in parts), len(parts), "answers")
        pieces = _by_row(read, outputs, len(rows))
        move(net, "cpu")
        by_net.append([kind.answer(task, row, some) for row, some in zip(rows, pieces, strict=True)])
    lines = []
    for number, row in enumerate(rows):
        texts = {name: row[name] for name in task.text}
        label = kind.shown(task, row[task.label]) if task.label in row else None
        both = [next(iter(some[number].values())) for some in by_net]
        lines.append({"texts": texts, "given": label, "answers": both})
    return lines


def _inputs(whole: PaddedBatches, rows: int) -> tuple[PaddedBatches, list[int]]:
    """Return the inputs of the first rows, and their order from the shortest to the longest."""
    encoded: Dataset = whole.encoded
    of = encoded["example"] if "example" in encoded.column_names else range(len(encoded))  # a row may be several
    chosen = encoded.select([number for number, row in enumerate(of) if row < rows])
    lengths = list(chosen["length"])
    return PaddedBatches(chosen, whole.pad_token), sorted(range(len(lengths)), key=lengths.__getitem__)


def _by_row(data: DataModule, outputs: Any, rows: int) -> list[list[Any]]:
    """Return for each of ``rows`` rows the pieces of its answer in the ``outputs`` of all batches."""
    by_row: list[list[Any]] = [[] for _ in range(rows)]
    for batch, some in outputs:
        for number, piece in task_type(data.record).pieces(data.record, some, batch):
            by_row[number].append(piece)
    return by_row


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return ids, text columns and the given label of a row, in this order."""
    kept = json.loads(row.get(KEPT) or "{}")
    given = {"given": kept.pop("given")} if "given" in kept else {}
    return kept | {name: value for name, value in row.items() if name != KEPT} | given
