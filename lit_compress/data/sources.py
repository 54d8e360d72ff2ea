"""Where the rows come from: a folder of files, the hub, or the package itself; checked row by row.

Whatever the source, a split becomes a dataset with the task's text columns and, if the rows have labels, the label
column, as the kind of the task stores it: a class number, a float, ... Rows are counted from 1, a header is no row.
They pass one part at a time and lie in the cache folder, so that memory stays flat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.cache import build_once, cache_folder, short_hash
from lit_compress.data.encode import content_key
from lit_compress.data.readers import CHUNK, READERS, Row, Rows, from_table, need_columns
from lit_compress.embedded import load_texts
from lit_compress.errors import UserError, nearest
from lit_compress.kinds import kind_of
from lit_compress.kinds.classification import UNLABELLED
from lit_compress.progress import note
from lit_compress.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset

CUSTOM = "custom"  # the task whose records data/custom.py makes
ALL = "all"  # a split: every row of a single file
FEWEST_TO_SPLIT = 10
FORMAT = 1  # raise it when the checks or the columns written here change, so that old caches are not read


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
    if task.name == CUSTOM:
        assert path is not None
        return split in custom_sources(task, path, [split], 0)
    if path is not None:
        return find_split(task, path, split) is not None
    return split in (_embedded(task) if task.hub is None else _hub(task, *task.hub))


def load_split_files(
    task: Task, path: str | None, splits: Iterable[str] | None = None, labelled: bool = True, seed: int = 0
) -> dict[str, Dataset]:
    """Read splits of ``task`` from the folder ``path``; without one from the hub, or from the package.

    Args:
        task: names the columns, the labels and the splits.
        path: a folder with ``train`` and ``validation`` (or ``dev``) and ``test`` files, as .parquet,
            .jsonl, .json (one object a line), .csv, .tsv (quotes are ordinary characters there) or .txt (one text a
            line, without labels).
        splits: what to read; None: ``train`` and all of ``task.validation``.
        labelled: the splits must have labels; else a split without them has no label column.
        seed: decides the splits of task ``custom`` if all rows are in one file.

    Returns:
        The splits asked for; those of ``task.validation`` after the first only if they are there.

    Raises:
        UserError: anything wrong with the folder, a file, a column or a row; one line that names it.
    """
    wanted = list(splits) if splits is not None else ["train", *task.validation]
    if task.name == CUSTOM:
        assert path is not None  # custom_task
        sources = custom_sources(task, path, wanted, seed)
    elif path is not None:
        sources = _local(task, path, wanted)
    elif task.hub is None:
        sources = _embedded(task)
    else:
        sources = _hub(task, *task.hub)
    loaded = {}
    for split in wanted:
        if split in sources:
            loaded[split] = _checked(task, sources[split], labelled)
        elif split not in task.validation[1:]:
            raise UserError(f"data.task: '{task.name}' has no split '{split}'; {nearest(split, sources)}")
    return loaded


# ------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """Where a split comes from.

    Attributes:
        where: how errors call it.
        key: gives a hash of its content.
        read: gives its rows.
        part: from where to where in the shuffled rows; None for all of them as they are.
        seed: of that shuffle.
    """

    where: str
    key: Callable[[], str]
    read: Callable[[], Rows]
    part: tuple[float, float] | None = None
    seed: int = 0


Sources = dict[str, Source]  # by split


def _local(task: Task, path: str, wanted: list[str]) -> Sources:
    """The files of the splits ``wanted``; a missing one is an error, but for a second validation split."""
    sources: Sources = {}
    for split in wanted:
        file = find_split(task, path, split)
        if file is not None:
            sources[split] = _file_source(task, file)
        elif split not in task.validation[1:]:
            names, suffixes = "|".join(_names(task, split)), "|".join(READERS)
            there = sorted(Path(path).expanduser().iterdir())
            found = (
                nearest(split + there[0].suffix, (entry.name for entry in there)) if there else "the folder is empty"
            )
            raise UserError(
                f"data.path: '{path}' has no file for the split '{split}'; looked for ({names})({suffixes}), {found}"
            )
    return sources


# splits without a file -> which part of the training file each split is
_PARTS = {
    ("validation", "test"): {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)},
    ("validation",): {"train": (0.0, 0.9), "validation": (0.9, 1.0)},
}


def custom_sources(task: Task, path: str, wanted: Iterable[str], seed: int) -> Sources:
    """Return the splits ``wanted`` of the user's own data; what has no file is a seeded part of the training file.

    Args:
        task: names the columns.
        path: a file, or a folder with ``train``, or one written by ``save_to_disk`` of the library datasets.
        wanted: names of splits, or ``all`` for every row of a single file.
        seed: of the parts.

    Raises:
        UserError: nothing of that is there.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in READERS:
            raise UserError(f"data.path: '{path}' is no {', '.join(READERS)}; {nearest(place.suffix, READERS)}")
        found = {"train": _file_source(task, place)}
    elif (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
        found = _saved(task, place)
    else:
        files = {split: find_split(task, path, split) for split in ("train", "validation", "test")}
        found = {split: _file_source(task, file) for split, file in files.items() if file is not None}
    if ALL in wanted and place.is_file():
        return {ALL: found["train"]}
    missing = tuple(split for split in ("validation", "test") if split not in found)
    if missing in _PARTS and "train" in found:
        whole = found["train"]
        found |= {split: replace(whole, part=part, seed=seed) for split, part in _PARTS[missing].items()}
    return found


def _saved(task: Task, folder: Path) -> Sources:
    """The splits of a folder that ``save_to_disk`` wrote; a single set is ``train``."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # missing or broken files: datasets raises many classes
        raise UserError(f"data.path: '{folder}' is no readable dataset: {str(error).splitlines()[0][:160]}") from error
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    sources: Sources = {}
    for split, rows in splits.items():
        where = f"data.path: '{folder}' split '{split}'"
        table = rows.data.table.cast(rows.features.arrow_schema)  # with the names of classes
        sources[split] = Source(where, partial(content_key, rows), partial(from_table, task, where, table))
    return sources


def _file_source(task: Task, file: Path) -> Source:
    where = f"data.path: '{file}'"
    return Source(where, partial(_file_key, file), partial(READERS[file.suffix], task, where, file))


def _file_key(file: Path) -> str:
    with file.open("rb") as stream:
        return file.suffix + hashlib.file_digest(stream, "sha256").hexdigest()


def _embedded(task: Task) -> Sources:
    """The rows the package makes."""
    return {
        split: Source(
            f"data.task: '{task.name}' split '{split}'",
            partial(short_hash, rows),
            partial(Rows, list(rows[0]), iter(rows)),
        )
        for split, rows in load_texts(task).items()
    }


def _hub(task: Task, repository: str, configuration: str | None) -> Sources:
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
    sources: Sources = {}
    for split in map(str, dataset):
        where = f"data.task: '{task.name}' split '{split}'"
        key = partial(content_key, dataset[split])
        sources[split] = Source(where, key, partial(from_table, task, where, dataset[split].data.table))
    return sources


# ------------------------------------------------------------------ checks


def _checked(task: Task, source: Source, labelled: bool) -> Dataset:
    """Return the checked rows of a split, read from disk; they are checked once per content."""
    import datasets

    key = short_hash(FORMAT, source.key(), task.kind, task.text, task.label, task.labels)
    folder = build_once(cache_folder() / f"rows-{key}", partial(_write, task, source))
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    facts = json.loads((folder / "facts.json").read_text())
    for column, (count, first) in facts["empty"].items():
        note(f"{source.where}: '{column}' is empty in {count} of {len(rows)} rows, first in row {first}; they are kept")
    if source.part is not None:
        rows = _part(rows, source)
    if labelled and task.label not in rows.column_names:
        names = facts["names"]
        missing = f"no labels (all are {UNLABELLED})"
        if task.label not in names:
            missing = f"no column '{task.label}' ({nearest(task.label, names)})"
        raise UserError(f"{source.where} has {missing}; only predict reads rows without labels")
    return rows


def _part(rows: Dataset, source: Source) -> Dataset:
    """Return the part of the rows that ``source`` is, in their order."""
    assert source.part is not None
    if len(rows) < FEWEST_TO_SPLIT:
        raise UserError(f"{source.where} has {len(rows)} rows; to split them give {FEWEST_TO_SPLIT} or more")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(source.seed))
    first, last = (round(share * len(rows)) for share in source.part)
    return rows.select(order[first:last].sort().values.tolist())


def _write(task: Task, source: Source, folder: Path) -> None:
    """Check a split row by row and write it, a part at a time: ``rows.arrow``, and ``facts.json`` on them."""
    import pyarrow as pa

    kind, found = kind_of(task), source.read()
    if found.names is not None:
        need_columns(task, source.where, found.names)
    rows = enumerate(found.rows, start=1)
    number, row = next(rows, (0, {}))
    if not number:
        raise UserError(f"{source.where} is empty (0 rows)")
    has_labels = task.label in row and not kind.is_unlabelled(row[task.label])
    fields = [(name, pa.list_(pa.string()) if kind.words else pa.string()) for name in task.text]
    if has_ids := "id" in kind.extras and "id" in row:
        fields.append(("id", pa.string()))
    if has_labels and task.label not in task.text:  # plain text is its own label
        fields.append((task.label, kind.label_type()))
    schema = pa.schema(fields)
    ids: dict[str, int] = {}
    empty: dict[str, list[int]] = {}  # text column -> rows without text, the first of them
    names = dict.fromkeys([*(found.names or ()), *row])
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        while number:
            chunk = []
            while number and len(chunk) < CHUNK:
                where = f"{source.where} row {number}"
                chunk.append(_row(task, where, row, has_labels))
                for name in task.text:
                    if not kind.words and not chunk[-1][name].strip():
                        empty.setdefault(name, [0, number])[0] += 1
                if has_ids:
                    chunk[-1]["id"] = _id(where, row.get("id"), ids, number)
                number, row = next(rows, (0, {}))
            stream.write_table(pa.Table.from_pylist(chunk, schema=schema))
    (folder / "facts.json").write_text(json.dumps({"names": list(names), "empty": empty}))


def _row(task: Task, where: str, row: Row, has_labels: bool) -> Row:
    """Return the checked text columns and label of a row."""
    kind = kind_of(task)
    checked: Row = {}
    for name in task.text:
        if name not in row:
            raise UserError(f"{where} has no '{name}'; {nearest(name, row)}")
        checked[name] = _words(where, name, row[name]) if kind.words else _text(where, name, row[name])
    if has_labels:
        checked[task.label] = kind.label_of(task, where, {task.label: None, **row, **checked})
    elif task.label in row and not kind.is_unlabelled(row[task.label]):
        raise UserError(f"{where} has the label {row[task.label]!r:.60}, row 1 has none; give all rows one, or none")
    return checked


def _id(where: str, value: Any, seen: dict[str, int], number: int) -> str:
    """Return a row's id, noting it."""
    name = _text(where, "id", value)
    if seen.setdefault(name, number) != number:
        raise UserError(f"{where}: id '{name:.60}' is that of row {seen[name]} already; give every row its own")
    return name


def _text(where: str, name: str, value: Any) -> str:
    if value is None:
        raise UserError(f"{where}: '{name}' is null; fill it in or leave the row out")
    if not isinstance(value, str):
        raise UserError(f"{where}: '{name}' is {value!r:.60} ({type(value).__name__}); give text")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # half of a pair, as "\\ud800" in JSON
        raise UserError(f"{where}: '{name}' has no character at {error.start}, only half of one; mend it") from error
    return value


def _words(where: str, name: str, value: Any) -> list[str]:
    """Return the words, which may be written with blanks between them."""
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list):
        raise UserError(f"{where}: '{name}' is {value!r:.60} ({type(value).__name__}); give a list of words")
    if not value:
        raise UserError(f"{where}: '{name}' has no words; leave the row out")
    for i, word in enumerate(value, start=1):
        if not _text(f"{where} word {i}", name, word).strip():
            raise UserError(f"{where}: word {i} of '{name}' is {word!r:.60}; give text")
    return value
