"""Where the rows come from: a folder of files, the hub, or the package itself; checked row by row.

Whatever the source, a split becomes a dataset with the task's text columns and, if the rows have labels,
``label``: the class number, or a float for regression. Rows are counted from 1, a header is no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.data.readers import LABEL, READERS, Raw, from_rows, from_table
from lit_compress.embedded import load_texts
from lit_compress.errors import UserError, nearest
from lit_compress.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

UNLABELLED = -1  # how the hub marks the rows of a test split whose labels are secret


def _names(task: Task, split: str) -> list[str]:
    """File names without suffix that hold ``split``; the first validation split may be called plainly."""
    plain = ["validation"] if split == task.validation[0] else []
    names = [split, *plain]
    return list(dict.fromkeys([*names, *(name.replace("validation", "dev") for name in names)]))


def find_split(task: Task, path: str, split: str) -> Path | None:
    """Return the file of ``split`` in the folder ``path``, None if there is none.

    Raises:
        UserError: no such folder, or two files that could be meant.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"data.path: '{path}': {kind}; give a folder with train and validation files")
    files = [folder / f"{name}{suffix}" for name in _names(task, split) for suffix in READERS]
    found = [file for file in files if file.is_file()]
    if len(found) > 1:
        raise UserError(
            f"data.path: '{path}' holds {' and '.join(file.name for file in found)}, both could be '{split}'; leave one"
        )
    return found[0] if found else None


def has_split(task: Task, path: str | None, split: str) -> bool:
    """Say whether ``split`` is there to be read.

    Raises:
        UserError: as :func:`load_split_files`, for the folder or the hub.
    """
    if path is not None:
        return find_split(task, path, split) is not None
    return split in (_embedded(task) if task.hub is None else _hub(task, *task.hub))


def load_split_files(
    task: Task, path: str | None, splits: Iterable[str] | None = None, labelled: bool = True
) -> dict[str, Dataset]:
    """Read splits of ``task`` from the folder ``path``; without one from the hub, or from the package.

    Args:
        task: names the columns, the labels and the splits.
        path: a folder with ``train`` and ``validation`` (or ``dev``) and ``test`` files, as .parquet,
            .jsonl, .json (one object a line), .csv or .tsv (quotes are ordinary characters there).
        splits: what to read; None: ``train`` and all of ``task.validation``.
        labelled: the splits must have labels; else a split without them has no column ``label``.

    Returns:
        The splits asked for; those of ``task.validation`` after the first only if they are there.

    Raises:
        UserError: anything wrong with the folder, a file, a column or a row; one line that names it.
    """
    wanted = list(splits) if splits is not None else ["train", *task.validation]
    if path is not None:
        readers = _local(task, path, wanted)
    elif task.hub is None:
        readers = _embedded(task)
    else:
        readers = _hub(task, *task.hub)
    loaded = {}
    for split in wanted:
        if split in readers:
            where, read = readers[split]
            loaded[split] = _checked(task, where, *read(), labelled)
        elif split not in task.validation[1:]:
            raise UserError(f"data.task: '{task.name}' has no split '{split}'; {nearest(split, readers)}")
    return loaded


# ------------------------------------------------------------------------------------------- sources

Readers = dict[str, tuple[str, Callable[[], Raw]]]  # split -> how errors call it, how to read it


def _local(task: Task, path: str, wanted: list[str]) -> Readers:
    """The files of the splits ``wanted``; a missing one is an error, but for a second validation split."""
    readers: Readers = {}
    for split in wanted:
        file = find_split(task, path, split)
        if file is not None:
            readers[split] = (f"data.path: '{file}'", partial(READERS[file.suffix], task, file))
        elif split not in task.validation[1:]:
            names, suffixes = "|".join(_names(task, split)), "|".join(READERS)
            there = sorted(Path(path).expanduser().iterdir())
            found = (
                nearest(split + there[0].suffix, (entry.name for entry in there)) if there else "the folder is empty"
            )
            raise UserError(
                f"data.path: '{path}' has no file for the split '{split}'; looked for ({names})({suffixes}), {found}"
            )
    return readers


def _embedded(task: Task) -> Readers:
    """The rows the package makes."""
    return {
        split: (f"data.task: '{task.name}' split '{split}'", partial(from_rows, task, "", rows))
        for split, rows in load_texts(task).items()
    }


def _hub(task: Task, repository: str, configuration: str) -> Readers:
    """The splits of a hub dataset, from the local hub cache if it was loaded before."""
    import datasets

    try:
        dataset = datasets.load_dataset(repository, configuration)
    except Exception as error:  # no network, a proxy, no such repository: datasets raises dozens of classes
        reason = str(error).strip().split("\n")[0][:160]
        raise UserError(
            f"data.task: cannot load '{task.name}' ({repository}) from the hub ({type(error).__name__}: "
            f"{reason}); without network give a folder of files with --data.path"
        ) from error
    readers: Readers = {}
    for split in map(str, dataset):
        where = f"data.task: '{task.name}' split '{split}'"
        readers[split] = (where, partial(from_table, task, where, dataset[split].data.table))
    return readers


# ------------------------------------------------------------------ checks


def _checked(
    task: Task, where: str, texts: pa.Table, written: list[Any] | None, names: list[str], labelled: bool
) -> Dataset:
    """Put checked texts and labels together."""
    import datasets
    import pyarrow as pa

    if not len(texts):
        raise UserError(f"{where} is empty (0 rows)")
    if written is None or all(_is_unlabelled(value) for value in written):
        if labelled:
            missing = f"no labels (all are {UNLABELLED})"
            if written is None:
                missing = f"no column '{LABEL}' ({nearest(LABEL, names)})"
            raise UserError(f"{where} has {missing}; only predict reads rows without labels")
        return datasets.Dataset(texts)
    to_label = _class_number if task.kind == "classification" else _number
    labels = [to_label(task, f"{where} row {row}", value) for row, value in enumerate(written, start=1)]
    kind = pa.int64() if task.kind == "classification" else pa.float32()
    return datasets.Dataset(texts.append_column(LABEL, pa.array(labels, kind)))


def _is_unlabelled(value: Any) -> bool:
    return value in (UNLABELLED, str(UNLABELLED), str(float(UNLABELLED)))


def _class_number(task: Task, where: str, value: Any) -> int:
    """Return the class of a label: its name, or its number as an integer or as digits."""
    if value is None or value != value:
        raise UserError(f"{where}: the label is null; fill it in or leave the row out")
    if value in task.labels:
        return task.labels.index(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.isascii() and value.isdigit()):
        number = int(value)
        if 0 <= number < len(task.labels):
            return number
    raise UserError(
        f"{where}: label {value!r:.60} is none of task '{task.name}'; {nearest(value, task.labels)}, "
        f"or 0..{len(task.labels) - 1}"
    )


def _number(task: Task, where: str, value: Any) -> float:
    """Return a regression label."""
    if value is None:
        raise UserError(f"{where}: the label is null; fill it in or leave the row out")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: label {value!r:.60} is not a finite number; task '{task.name}' is a regression")
    return number
