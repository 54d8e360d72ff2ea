"""Facts of the data that a user should know before use: rows, classes, lengths, cut, empty and repeated texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lit_compress.tasks import task_type
from lit_compress.tasks.base import IGNORED
from lit_compress.tasks.records import Task

if TYPE_CHECKING:
    from datasets import Dataset

CHUNK = 10_000  # rows that are Python objects at one time


@dataclass(frozen=True)
class SplitFacts:
    """One split.

    Attributes:
        split: its name.
        rows: how many are used.
        available: how many there are.
        inputs: of the model; more than rows where one is read in parts, else as many.
        longest: tokens of the longest input, after it was cut.
        cut: inputs that were longer than the model reads.
        empty: rows with a text that is empty.
        repeated: rows whose texts were in an earlier row of the split; 0 if the rows are one text.
        in_train: rows whose texts are also in the training rows; 0 for these, and where the rows are one text.
        classes: ``name`` and ``count`` of every class, over the rows or, where words have classes, over the words.
    """

    split: str
    rows: int
    available: int
    inputs: int
    longest: int
    cut: int
    empty: int
    repeated: int
    in_train: int
    classes: list[dict[str, Any]]


@dataclass(frozen=True)
class DataFacts:
    """All splits that a fit reads, the training rows first; ``max_length``: tokens that the model reads."""

    max_length: int
    splits: list[SplitFacts]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def data_facts(task: Task, splits: Mapping[str, tuple[Dataset, Dataset, int]], max_length: int) -> DataFacts:
    """Return the facts of data that is read and tokenised already.

    Args:
        task: names the columns.
        splits: by name: checked rows, the same as token ids (``length``, ``truncated``), how many rows there are in
            all; the first is the training split.
        max_length: tokens of the longest input.
    """
    known: set[int] = set()
    by_split = []
    for name, (rows, encoded, available) in splits.items():
        facts, texts = _split_facts(task, name, rows, encoded, available, known)
        known = known or texts
        by_split.append(facts)
    return DataFacts(max_length, by_split)


def _split_facts(
    task: Task, name: str, rows: Dataset, encoded: Dataset, available: int, trained: set[int]
) -> tuple[SplitFacts, set[int]]:
    """Return the facts of a split, and the hashes of its texts."""
    texts: set[int] = set()
    empty = repeated = in_train = 0
    for row in () if task_type(task).one_text else _texts(task, rows):
        empty += not all(text if isinstance(text, tuple) else text.strip() for text in row)
        key = hash(row)
        repeated += key in texts
        in_train += key in trained
        texts.add(key)
    columns = encoded.with_format("numpy")
    return SplitFacts(
        split=name, rows=len(rows), available=available, inputs=len(encoded), longest=int(columns["length"][:].max()),
        cut=int(columns["truncated"][:].sum()), empty=empty, repeated=repeated, in_train=in_train,
        classes=class_counts(task, rows),
    ), texts  # fmt: skip


def _texts(task: Task, rows: Dataset) -> Iterator[tuple[Any, ...]]:
    """Yield the text columns of every row; a list of words becomes a tuple."""
    for part in rows.select_columns(list(task.text)).iter(batch_size=CHUNK):
        columns = ([tuple(v) if isinstance(v, list) else v for v in part[name]] for name in task.text)
        yield from zip(*columns, strict=True)


def class_counts(task: Task, rows: Dataset) -> list[dict[str, Any]]:
    """Return ``name`` and ``count`` of every class of ``task``, in its order; [] where it has no classes."""
    if not task.labels or task.label not in rows.column_names:
        return []
    counts: Counter[int] = Counter()
    for part in rows.select_columns([task.label]).iter(batch_size=CHUNK):
        for label in part[task.label]:
            counts.update(label if isinstance(label, list) else [label])
    counts.pop(IGNORED, None)
    return [{"name": name, "count": counts[number]} for number, name in enumerate(task.labels)]
