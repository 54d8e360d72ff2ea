"""Checking rows: every split is checked once and written to the cache; an error is one line with file and row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.data.batching import drawn_order
from lit_compress.data.readers import CHUNK, Row, Rows, check_names
from lit_compress.tasks import task_type
from lit_compress.tasks.base import KIND, UNLABELLED
from lit_compress.tasks.records import Task
from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.cache import build_once, cache_folder, short_hash
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note
from lit_compress.utils.types import Dataset

if TYPE_CHECKING:
    import pyarrow as pa

FEWEST_TO_SPLIT = 10
IDS = ("id", "idx")  # columns that predictions keep
KEPT = "__kept__"  # in rows for predictions: ids and given labels as they are in the file, as JSON
FORMAT = 9  # to be raised when the checks or the columns written here change, so that old caches are not read


@dataclass(frozen=True)
class Source:
    """The source of a split."""

    where: str  # its name at the beginning of error messages
    key: Callable[[], str]  # returns a hash of its content
    read: Callable[[], Rows]
    part: tuple[float, float] | None = None  # the split's part of the shuffled rows, as two fractions; None: all
    seed: int = 0  # of that shuffle
    split: str = ""  # name of the split that the part is
    files: Sequence[Path] = ()  # that are read, if they are the user's


def checked(task: Task, source: Source, labelled: bool, optional: bool = False) -> Dataset:
    """Return the checked rows of a split from the cache, which is written once for the same content.

    Args:
        task, source: the names of the columns, and the rows.
        labelled: True if the rows must have labels; else labels are not checked, and kept with the ids in ``KEPT``.
        optional: True if they may also have none at all, for readers of texts only.

    Raises:
        UserError: a row is not usable, or labels are missing although ``labelled`` and not ``optional``.
    """
    import datasets

    answered = task.spans.null_threshold is None  # True: rows without an answer are refused
    key = short_hash(
        FORMAT, source.key(), task.kind, task.text, task.label_columns or task.label, task.labels, task.numbered,
        answered, labelled, optional, task.hub is None,
    )  # fmt: skip
    folder = build_once(cache_folder() / f"rows-{key}", partial(_write, task, source, labelled, optional))
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    if task_type(task).lists and labelled and not optional and not any(rows[task.label]):
        raise UserError(f"{source.where} has no relevant document: every label is 0")
    if source.part is not None:
        whole, rows = len(rows), _part(rows, source, lists_in(task, rows))
        note(f"{source.where}: {len(rows)} of {whole} rows are its {source.split} split")
    return rows


def lists_in(task: Task, rows: Dataset) -> list[str] | None:
    """Return for every row which list it belongs to; None if rows are no lists, or not there but as token ids."""
    name = task.text[0]
    return list(rows[name]) if task_type(task).lists and name in rows.column_names else None


def _part(rows: Dataset, source: Source, lists: Sequence[str] | None) -> Dataset:
    """Return the part of the rows that belongs to ``source``, in their order; every one of the ``lists`` whole."""
    assert source.part is not None
    if len(rows) < FEWEST_TO_SPLIT:
        raise UserError(f"{source.where} has {len(rows)} rows; to split them give {FEWEST_TO_SPLIT} or more")
    order = drawn_order(len(rows), source.seed, lists)

    def cut(share: float) -> int:
        place = round(share * len(rows))
        while lists is not None and 0 < place < len(rows) and lists[order[place]] == lists[order[place - 1]]:
            place += 1
        return place

    first, last = map(cut, source.part)
    if first == last:
        raise UserError(f"{source.where} has too few lists of rows, {len(set(lists or ()))}; to split them give more")
    return rows.select(sorted(order[first:last]))


def _write(task: Task, source: Source, labelled: bool, optional: bool, folder: Path) -> None:
    """Check a split row by row and write it in chunks as ``rows.arrow``; the arguments are those of :func:`checked`."""
    import pyarrow as pa

    kind, table = task_type(task), source.read()
    if table.names is not None:
        check_names(task, source.where, table.names)
    if classes := table.classes or []:
        _check_classes(task, source.where, classes)
    rows: Iterator[tuple[int, Row]] = enumerate(map(partial(_with_label, task, classes), table.rows), start=1)
    number, row = next(rows, (0, {}))
    if not number:
        raise no_rows(source.where, table.names)
    names = dict.fromkeys([*(table.names or ()), *row])
    absent = [name for name in task.label_columns or (task.label,) if name not in names]
    if labelled and 0 < len(absent) < len(task.label_columns):
        raise UserError(f"{source.where} has no column '{absent[0]}'; {nearest(absent[0], names)}")
    is_plain = task.label in task.text  # plain text is its own label, and has empty lines
    given = task.label in row and not _is_secret(task, row[task.label])
    has_labels = given and (labelled or is_plain)
    fields = [(name, pa.list_(pa.string()) if kind.words else pa.string()) for name in task.text]
    if has_ids := "id" in kind.extras and "id" in row:
        fields.append(("id", pa.string()))
    if keeps := not labelled and not is_plain:  # the first row may have no id, and others one
        fields.append((KEPT, pa.string()))
    if has_kind := KIND in row:
        fields.append((KIND, pa.int64()))
    schema = pa.schema([*fields, (task.label, _arrow(kind.stored))] if has_labels and not is_plain else fields)
    ids: dict[str, int] = {}

    def made(number: int, row: Row) -> Row:
        where = f"{source.where} row {number}"
        found = _row(task, where, row, has_labels, labelled)
        if has_ids:
            given = row.get("id")
            name = found["id"] = _text(where, "id", str(given) if isinstance(given, int) else given)
            if (other := ids.setdefault(name, number)) != number:
                raise UserError(f"{where}: row {other} has the id '{name:.60}' already; give every row its own")
        found |= {KIND: row[KIND]} if has_kind else {}
        return found | {KEPT: _kept(task, row, found)} if keeps else found

    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        rows = chain([(number, row)], rows)
        while chunk := list(islice(rows, CHUNK)):
            stream.write_table(pa.Table.from_pylist([made(*numbered) for numbered in chunk], schema=schema))
    if labelled and not (optional or given) and task.label:
        missing = (
            f"no column '{absent[0]}' ({nearest(absent[0], names)})" if absent else f"no labels (all are {UNLABELLED})"
        )
        raise UserError(
            f"{source.where} has {missing}; only predict reads such rows, and factorize by SecondOrder, SVD or "
            "SliceGPT such training rows"
        )


def _check_classes(task: Task, where: str, classes: Sequence[str]) -> None:
    """Refuse the classes that a column brings if they are not the task's, also such as would be read as its numbers."""
    known = {label.casefold() for label in task.labels}
    others = [name for name in classes if name.strip().casefold() not in known]
    numbers = list(classes) == [str(number) for number in range(len(classes))]
    if task.labels and not numbers and (len(others) == len(classes) or any(name.isdigit() for name in others)):
        raise UserError(
            f"{where}: the column '{task.label}' has the classes {', '.join(classes)}, the labels are "
            f"{', '.join(task.labels)}; name both alike (id2label of config.json), or store numbers without names"
        )


def _arrow(stored: Any) -> pa.DataType:
    """Return the Arrow type that ``TaskType.stored`` describes."""
    import pyarrow as pa

    if isinstance(stored, dict):
        return pa.struct([(name, _arrow(one)) for name, one in stored.items()])
    return pa.list_(_arrow(stored[0])) if isinstance(stored, list) else pa.type_for_alias(stored)


def no_rows(where: str, names: Sequence[str] | None) -> UserError:
    """Return the error for a file without rows, whose columns are known if they do not come with the rows."""
    header = f"a header ({', '.join(names)}) and " if names else ""
    return UserError(f"{where} has {header}no rows")


def _with_label(task: Task, classes: list[str], row: Row) -> Row:
    """Return a row with its label: class numbers as the names that the table has for them, columns of 0 and 1 as one.

    The label of columns is {column: value}.
    """

    def name(value: object) -> object:
        if isinstance(value, list):
            return [name(item) for item in value]
        return classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value

    flags = {name.strip(): row[name] for name in task.label_columns if name in row}
    return row | {task.label: flags or name(row[task.label])} if flags or (classes and task.label in row) else row


def _row(task: Task, where: str, row: Row, has_labels: bool, labelled: bool) -> Row:
    """Return the checked text columns and label of a row."""
    kind = task_type(task)
    checked: Row = {}
    for name in task.text:
        if name not in row:
            raise UserError(f"{where} has no '{name}'; {nearest(name, row)}")
        checked[name] = _words(where, name, row[name]) if kind.words else _text(where, name, row[name])
    if has_labels and _is_secret(task, row.get(task.label)):
        raise UserError(f"{where}: the label is {UNLABELLED}, which is none; fill it in or leave the row out")
    if has_labels:
        checked[task.label] = kind.label_of(task, where, {task.label: None, **row, **checked})
    elif labelled and task.label in row and not _is_secret(task, row[task.label]):
        raise UserError(f"{where} has the label {row[task.label]!r:.60}, row 1 has none; give all rows one, or none")
    return checked


def _kept(task: Task, row: Row, checked: Row) -> str:
    """Return the row's ids and its label, if it has some, as JSON; a class by its name."""
    kept = {name: row[name] for name in IDS if row.get(name) is not None and row[name] == row[name]}  # not NaN
    kind, label = task_type(task), row.get(task.label)
    if label is not None and label == label and not _is_secret(task, label):
        kept["given"] = label
        with suppress(UserError):  # a label that is no class stays as it is
            kept["given"] = kind.shown(task, kind.label_of(task, "", row | checked)) if kind.classes else label
    return json.dumps(kept, default=str)


def _is_secret(task: Task, label: Any) -> bool:
    """Return whether the hub marks a label as secret; in the user's own files -1 is an ordinary label."""
    marks = (UNLABELLED, str(UNLABELLED), str(float(UNLABELLED)))
    return task.hub is not None and task_type(task).secret and label in marks


def _text(where: str, name: str, value: Any) -> str:
    if value is None:
        raise UserError(f"{where}: '{name}' is null; fill it in or leave the row out")
    if not isinstance(value, str):
        raise UserError(f"{where}: '{name}' is {value!r:.60} ({type(value).__name__}); give text")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # half of a pair, as "\\ud800" in JSON
        raise UserError(f"{where}: '{name}' has no character at {error.start}, only half of one; correct it") from error
    return value


def _words(where: str, name: str, value: Any) -> list[str]:
    """Return the words of a list, or of a text of one or with spaces between words."""
    if isinstance(value, str):
        words = list_in(f"{where}: '{name}'", value)
        value = value.split() if words is None else words
    if not isinstance(value, list):
        raise UserError(f"{where}: '{name}' is {value!r:.60} ({type(value).__name__}); give a list of words")
    if not value:
        raise UserError(f"{where}: '{name}' has no words; leave the row out")
    for i, word in enumerate(value, start=1):
        if not _text(f"{where} word {i}", name, word).strip():
            raise UserError(f"{where}: word {i} of '{name}' is {word!r:.60}; give text")
    return value
