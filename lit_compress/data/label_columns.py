"""Labels with a column each, of 0 and 1, as tables of several labels per row often have them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, islice

from lit_compress.data.checks import IDS
from lit_compress.data.json_rows import Row
from lit_compress.data.sources import custom_sources
from lit_compress.tasks import KINDS, TaskType
from lit_compress.tasks.multi_label import MultiLabel, flag, is_missing
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note


def checked_columns(kind: TaskType, names: list[str]) -> tuple[str, ...]:
    """Return the columns of 0 and 1, one for each label, that the user names.

    Raises:
        UserError: labels of this type are in one column, or there are not two, or one is named twice.
    """
    shown = f"data.custom.label: [{', '.join(names)}]"
    if not kind.own_columns:
        raise UserError(f"{shown}: kind {kind.name} has one label column; several of 0 and 1 are for kind multi_label")
    if len({name.strip() for name in names}) < max(2, len(names)):
        raise UserError(f"{shown}: name two or more, each once; one alone is for kind classification")
    return tuple(names)


def find_columns(task: Task, path: str, labels: Collection[str], encoding: str | None) -> tuple[str, ...]:
    """Return the columns of 0 and 1 of a file without a label column, one for each label.

    They are the classes where these are known; else all columns but texts and ids.

    Args:
        task: has the names of the other columns.
        path: as :func:`custom_task`.
        labels: names of the classes; () if they are not known.
        encoding: as :func:`custom_task`.

    Returns:
        Their names, in order; () if there are none, or the file has a label column.

    Raises:
        UserError: only some of the columns have no other values, or ``task`` cannot have several labels.
    """

    def read(columns: list[str]) -> tuple[str, list[str], Iterator[Row]] | None:
        """Return the name of a source, the names of its columns, and its rows, which have ``columns``."""
        sources = custom_sources(replace(task, label_columns=tuple(columns)), path, ["train"], encoding)
        if (source := sources.get("train", next(iter(sources.values()), None))) is None:
            return None
        table = source.read()
        first = list(islice(table.rows, 1))
        return source.where, table.names or list(*first), chain(first, table.rows)

    if (first := read([])) is None or task.label in first[1]:
        return ()
    where, names, _ = first
    if labels:
        return tuple(labels) if set(labels) <= set(names) else ()
    others = [name for name in names if name not in (*task.text, *IDS)]
    flags = dict.fromkeys(others, False)  # whether a 0 or 1 was seen; a column with another value is left out
    for row in (read(others) or first)[2]:
        for name, value in ((name, row.get(name)) for name in list(flags)):
            if flag(value) is None and not is_missing(value):
                del flags[name]
            else:
                flags[name] |= not is_missing(value)
    columns = tuple(name for name, seen in flags.items() if seen)
    if len(columns) < 2:
        return ()
    option = f"--data.custom.label {shlex.quote(json.dumps(columns, ensure_ascii=False))}"
    if not KINDS[task.kind].own_columns:
        option = f"--data.custom.kind {MultiLabel.name} {option}"
    elif len(columns) == len(others):
        note(f"{where}: the labels are the columns {', '.join(columns)}, of 0 and 1")
        return columns
    raise UserError(f"{where} has no column '{task.label}'; if columns of 0 and 1 are the labels, give {option:.500}")
