"""The task ``custom``: the user's own files, columns by name, labels found in the training file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lit_compress.cache import build_once, cache_folder, short_hash
from lit_compress.data.sources import Source, custom_sources
from lit_compress.errors import UserError, nearest
from lit_compress.kinds import KINDS
from lit_compress.kinds.classification import label_name
from lit_compress.tasks import Custom, Task

MOST_LABELS = 1000  # more are numbers or texts, not classes


def custom_task(settings: Custom, path: str | None, seed: int) -> Task:
    """Return the record of the user's task.

    Args:
        settings: kind, columns and labels; what is None is the kind's usual, labels are found in the training rows.
        path: a file, or a folder with ``train``, or one written by ``save_to_disk`` of the library datasets.
        seed: decides how a single file is split.

    Raises:
        UserError: there is no path, the labels make no task, or a row has none.
    """
    if path is None:
        raise UserError("data.path: task 'custom' has no data of its own; give a file or a folder")
    kind = KINDS[settings.kind]
    text = tuple(settings.text or kind.columns)
    fewest, most = kind.texts
    if not fewest <= len(text) <= most:
        raise UserError(
            f"data.custom.text: {', '.join(text)}: kind {kind.name} has {fewest} to {most} columns, e.g. "
            f"{', '.join(kind.columns)}"
        )
    label = settings.label or (text[0] if kind.label in kind.columns else kind.label)  # plain text is its own label
    draft = Task(
        "custom", settings.kind, text, (), (), None, length=kind.length, max_length=kind.max_length, label=label
    )
    labels = tuple(settings.labels or ()) if kind.classes else ()
    if kind.classes and not labels:
        sources = custom_sources(draft, path, ["train"], seed)
        if "train" not in sources:
            raise UserError(f"data.path: '{path}' has no file for 'train', and data.custom.labels names no classes")
        labels = tuple(find_labels(draft, sources["train"]))
    if kind.classes and len(set(labels)) < max(2, len(labels)):
        raise UserError(f"data.custom.labels: {', '.join(labels)}: give two or more, each once")
    return Task(
        "custom", settings.kind, text, labels, kind.metrics(labels), None,
        length=kind.length, max_length=kind.max_length, label=label,
    )  # fmt: skip


def find_labels(task: Task, source: Source) -> list[str]:
    """Return the labels of the training rows: the names a ``ClassLabel`` column brings, else all values, sorted.

    Raises:
        UserError: a label is null, labels are of several types, or there are too many or too few.
    """
    key = short_hash(source.key(), task.kind, task.text, task.label)

    def fill(folder: Path) -> None:
        (folder / "labels.json").write_text(json.dumps(_read_labels(task, source)), encoding="utf-8")

    return json.loads((build_once(cache_folder() / f"labels-{key}", fill) / "labels.json").read_text(encoding="utf-8"))


def _read_labels(task: Task, source: Source) -> list[str]:
    found = source.read()
    if found.names is not None and task.label not in found.names:
        raise UserError(f"{source.where} has no column '{task.label}'; {nearest(task.label, found.names)}")
    if found.classes:
        return found.classes
    values: dict[str, int] = {}
    first: tuple[type, str] | None = None
    for number, row in enumerate(found.rows, start=1):
        where = f"{source.where} row {number}"
        if task.label not in row:
            raise UserError(f"{where} has no '{task.label}'; {nearest(task.label, row)}")
        values_here = KINDS[task.kind].labels_in(row[task.label])
        if not isinstance(values_here, list):
            raise UserError(f"{where}: '{task.label}' is {values_here!r:.60}; give a list")
        for value in values_here:
            name = label_name(where, value)
            kind = str if isinstance(value, str) else bool if isinstance(value, bool) else int
            first = first or (kind, where)
            if kind is not first[0]:
                raise UserError(
                    f"{where}: label {value!r:.60} is {kind.__name__}, that of row 1 {first[0].__name__}; "
                    "write all in one way"
                )
            values.setdefault(name, number)
            if len(values) > MOST_LABELS:
                raise UserError(
                    f"{where}: label {value!r:.60} is the {len(values)}th different one; give a column of classes, or "
                    "kind regression"
                )
    if len(values) < 2:
        raise UserError(f"{source.where}: all labels are '{', '.join(values)}'; give two or more")
    return sorted(values, key=_order(list(values)))


def _order(names: list[str]) -> Any:
    """Return the sort key: by value if all are whole numbers, else by the alphabet."""
    return int if all(name.removeprefix("-").isdecimal() for name in names) else str
