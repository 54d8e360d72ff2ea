"""A model's answers on the dev set, and the changes between the answers of two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_compress.data.batching import PaddedBatches
from lit_compress.evaluation.predict import pieces_by_row
from lit_compress.tasks import KINDS, task_type
from lit_compress.utils.devices import move

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from lit_compress.data.datamodule import DataModule

EXAMPLES = 40
MOST_CLASSES = 12  # of a table that one can read


def answers(nets: Sequence[tuple[PreTrainedModel, DataModule]]) -> list[dict[str, Any]]:
    """Return the first rows of the dev set: text columns, ``given`` label and the models' answers, ``answers``.

    At most 2,000 rows; 50 where texts are written; none where the rows are one text, or the answers only vectors.

    Args:
        nets: each with the data as its own tokenizer reads it; models share it only if they have the same tokens.
    """
    data = nets[0][1]
    task, kind = data.record, task_type(data.record)
    if task.wants_vectors or not kind.answered or not len(data.validation_rows[0]):
        return []
    rows = data.validation_rows[0]
    rows = rows.select(range(min(kind.answered, len(rows))))
    by_net = []
    for net, read in nets:
        inputs, order = _inputs(read.val_dataloader()[0].dataset, len(rows))
        parts = [order[i : i + read.eval_rows] for i in range(0, len(order), read.eval_rows)]
        pieces = pieces_by_row(net, read, (inputs[part] for part in parts), len(parts), len(rows), "answers")
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


def changes(lines: Sequence[dict[str, Any]], kind: str, labels: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the changes between the first and the last answers of :func:`answers`; None without rows.

    Returns:
        ``rows``, ``changed`` (None for numbers, which all differ a little), ``examples``, with newly wrong ones first;
        if an answer is right or wrong, ``became_right`` and ``became_wrong``; for classes also ``confusion``:
        ``labels`` and a table [given][answer] for each model.
    """
    if not lines:
        return None
    shown = [{**line, "before": line["answers"][0], "after": line["answers"][-1]} for line in lines]
    for line in shown:
        del line["answers"]
    if KINDS[kind].loss != "classification":
        shown.sort(key=lambda line: -abs(line["after"] - line["before"]))
        return {"rows": len(lines), "changed": None, "examples": shown[:EXAMPLES]}
    other = [line for line in shown if line["before"] != line["after"]]
    summary: dict[str, Any] = {"rows": len(lines), "changed": len(other)}
    if KINDS[kind].classes:
        wrong = [line for line in other if line["before"] == line["given"]]
        right = [line for line in other if line["after"] == line["given"]]
        other = wrong + right + [line for line in other if line["given"] not in (line["before"], line["after"])]
        summary |= {"became_wrong": len(wrong), "became_right": len(right)}
    if KINDS[kind].classes and KINDS[kind].one_label and 1 < len(labels) <= MOST_CLASSES:
        summary["confusion"] = {
            "labels": list(labels),
            **{key: _table(shown, key, labels) for key in ("before", "after")},
        }
    return summary | {"examples": other[:EXAMPLES]}


def _table(lines: Sequence[dict[str, Any]], key: str, labels: Sequence[str]) -> list[list[int]]:
    counts = Counter((line["given"], line[key]) for line in lines)
    return [[counts[given, answer] for answer in labels] for given in labels]
