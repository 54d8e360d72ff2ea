"""The sources of splits: a folder of files, one file, a data set of the hub or of datasets.

From every source a split becomes a dataset with the task's text columns and, if the rows have labels, the label
column, as the type of task stores it: a class number, a float, ... Rows are counted from 1, without a header.
They are read in chunks and written to the cache folder, so that memory does not grow with the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

from lit_compress.data.checks import Source, checked
from lit_compress.data.encode import content_key
from lit_compress.data.readers import READERS, Place, Rows, check_names, from_table
from lit_compress.tasks import task_type
from lit_compress.tasks.base import KIND
from lit_compress.tasks.records import TASKS, Task
from lit_compress.utils.cache import short_hash
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.files import POINTER, is_pointer
from lit_compress.utils.hub import Snapshot, card_configurations, choose_configuration, dataset_snapshot, is_name
from lit_compress.utils.manifest import file_hash
from lit_compress.utils.progress import note
from lit_compress.utils.types import Dataset

CUSTOM = "custom"  # the task whose record data/custom.py makes
ALL = "all"  # name of a split with every row of a single file
DEV = dict.fromkeys(("dev", "valid", "val", "eval"), "validation")  # other names of the dev split

Sources = dict[str, Source]  # by split
T = TypeVar("T")


def is_one_table(place: Path) -> bool:
    """Return whether a path is one table without splits: a file, or one dataset that ``save_to_disk`` wrote."""
    return place.is_file() or (_is_saved(place) and not (place / "dataset_dict.json").is_file())


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def load_split_files(
    task: Task,
    place: Place,
    splits: Iterable[str] | None = None,
    labelled: bool = True,
    optional: Collection[str] = (),
) -> dict[str, Dataset]:
    """Return the rows of splits by name; ``task.validation`` after the first only if they exist.

    Args:
        task, place: the names of columns, labels and splits, and where the rows are.
        splits: to read; None: ``train`` and all of ``task.validation``.
        labelled: the splits must have labels; else a split without them has no label column.
        optional: splits that may have no labels although the others must.

    Raises:
        UserError: the folder, a file, a column or a row is not usable; the message names it.
    """
    wanted = list(splits) if splits is not None else ["train", *task.validation]
    sources, loaded = sources_at(task, place, wanted), {}
    for split in wanted:
        if split in sources:
            own = _first_test(task)
            if split == "test" != own and own in sources[split].where:
                note(f"{sources[split].where} is read as the test split")
            loaded[split] = checked(task, sources[split], labelled, split in optional)
        elif split not in task.validation[1:]:
            where = f"data.task: '{task.name}'" if place.path is None else place.where
            if sources:
                raise UserError(f"{where} has no split '{split}'; {nearest(split, sources)}")
            there = ", ".join(sorted(path.name for path in place.folder.iterdir())[:10])
            raise UserError(
                f"{where} has no split '{split}', e.g. {split}.csv; {f'it holds {there}' if there else 'it is empty'}"
            )
    return loaded


def sources_at(task: Task, place: Place, wanted: Collection[str]) -> Sources:
    """Return the splits at a place, of which ``wanted`` are read; those of the user's own data may be parts of one.

    Raises:
        UserError: the place is not usable.
    """
    path = place.folder
    if place.path is None:
        if (repository := located(task.name, None, place.revision)) is None:
            raise UserError(f"data.task: '{task.name}' has no data on the hub; give --data.path")
        return _folder(task, repository.folder, f"data.task: '{task.name}'", place)
    if task.configuration and (path.is_file() or _is_saved(path)):
        raise UserError(f"data.custom.configuration: {place.where} has no '{task.configuration}'; leave it out (null)")
    if path.is_file():
        if (suffix := path.suffix.lower()) not in READERS:
            raise UserError(f"{place.where} is no {', '.join(READERS)}; {nearest(suffix, READERS)}; unpack archives")
        sources = {"train": _files(task, [path], place)}
    elif _is_saved(path):  # a single dataset is ``train``
        from datasets import load_from_disk

        _refuse_pointers(sorted(file for file in path.rglob("*") if file.is_file()))
        sources = _loaded(task, place.where, lambda: load_from_disk(str(path)))
    elif path.is_dir():
        sources = _folder(task, path, place.where, place)
    else:
        raise UserError(f"{place.where}: no such folder or file; give a folder with train and validation files")
    if is_one_table(path) and (place.whole or ALL in wanted):
        return dict.fromkeys((split for split in wanted if split not in task.validation[1:]), sources["train"])
    first = task.validation[0]
    divides = task.name == CUSTOM or path.is_file() or _is_saved(path)
    if not divides or first in sources or "train" not in sources:
        return sources
    parts = {"train": (0.0, 0.9), first: (0.9, 1.0)}
    if "test" not in sources:
        parts = {"train": (0.0, 0.8), first: (0.8, 0.9), "test": (0.9, 1.0)}
    of_train = partial(replace, sources["train"], seed=place.seed)
    return sources | {
        name: of_train(part=part, split="validation" if name == first else name) for name, part in parts.items()
    }


def divided(task: Task, place: Place) -> str | None:
    """Return the hash of the rows of which the dev split is a part; None if it has rows of its own."""
    if place.path is None:
        return None
    name = task.validation[0]
    source = sources_at(task, place, ["train", name]).get(name)
    return None if source is None or source.part is None else short_hash(source.key(), source.part, source.seed)


def located(task: str, path: str | None, revision: str | None, configuration: str | None = None) -> Snapshot | None:
    """Return the data set of the hub that the options name, as a folder; None for local data.

    Without a path the data set of the ``task`` is meant; ``configuration`` is its part, if the task does not know it.

    Raises:
        UserError: there is no such data set, it has several configurations, or a revision of local data is given.
    """
    hub = TASKS[task].hub if task in TASKS else None
    if path is not None and "/" in path and is_name(path) and Path(path).suffix.lower() not in READERS:
        return dataset_snapshot("data.path", path, revision, configuration, hub and hub[1])
    if path is None and hub is not None:
        return dataset_snapshot("data.task", hub[0], revision, usual=hub[1])
    if revision is not None:
        what = f"'{path}' is no name on the hub" if path else f"the data of '{task}' is not on the hub"
        raise UserError(f"data.revision: '{revision}' is given, but {what}; leave it out (null)")
    return None


def _folder(task: Task, folder: Path, where: str, place: Place) -> Sources:
    """Return the splits of a folder: files called by their splits, or a repository in the layout of the hub."""
    usual = task.hub and task.hub[1]
    plain, parts = _tables_in(task, folder)
    if task.configuration or not plain:
        if known := card_configurations(folder):
            from datasets import load_dataset

            chosen = choose_configuration(where, known, task.configuration, usual)
            # with its files named, those of other configurations, which are not here, are not looked for
            return _loaded(task, where, lambda: load_dataset(str(folder), chosen, data_files=known[str(chosen)]))
        if (wanted := task.configuration or usual) and (folder / wanted).is_dir():
            plain, parts = _tables_in(task, folder / wanted)
        elif task.configuration:
            raise UserError(f"data.custom.configuration: {where} has no '{wanted}'; leave it out (null)")
    found = plain or parts
    for split in {"train", *found} if task_type(task).one_text else ():  # a folder of several kinds, of any formats
        kinds = [path for path in _visible(folder / split, "*") if path.suffix.lower() in READERS]
        if kinds and split in plain:
            both = f"{plain[split][0].name} and the folder {split}"
            raise UserError(f"{where} holds {both}, both could be '{split}'; leave one")
        found |= {split: kinds} if kinds else {}
    return {split: _files(task, files, place) for split, files in found.items()}


def _visible(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.glob(pattern)) if path.name[0] != "."]


def _tables_in(task: Task, folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Return the tables of a folder by split: those that are called like it, ``train.csv``, and those in parts.

    In parts are ``train-00000-of-00002.parquet`` and ``train/0000.parquet``; of several formats it is the first one.
    """
    where, plain = f"data.path: '{folder}'", dict[str, list[Path]]()
    found: dict[str, dict[str, list[Path]]] = {}  # by format, by split
    for path in (path for depth in ("*", "*/*", "*/*/*") if not plain for path in _visible(folder, depth)):
        suffix, parent = path.suffix.lower(), path.parent.name
        if suffix not in READERS or not path.is_file():
            continue
        stem = path.name[: -len(suffix)]
        if (part := re.fullmatch(r"(.+?)-\d+-of-\d+", stem)) or (path.parent != folder and "=" not in parent):
            split = part[1] if part else stem if parent == "data" else parent.removeprefix("partial-")
            found.setdefault(suffix, {}).setdefault(split, []).append(path)
        elif path.parent == folder and _named(task, stem) in ("train", "test", *task.validation):
            if stem in plain:
                both = f"{plain[stem][0].name} and {path.name}"
                raise UserError(f"{where} holds {both}, both could be '{stem}'; leave one")
            plain[stem] = [path]
    formats = [suffix for suffix in READERS if suffix in found]
    if formats[1:] and not plain and not task_type(task).one_text:
        note(f"{where}: its {formats[0]} files are read, not its {' and '.join(formats[1:])} files")
    return _as_named(task, where, plain), _as_named(task, where, found[formats[0]] if formats else {})


def _files(task: Task, files: Sequence[Path], place: Place) -> Source:
    """Return the source of the rows in one file or, one after the other, in several."""
    where = f"data.path: '{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    kinds = kinds_of(files) if task_type(task).one_text else []
    _refuse_pointers(files)

    def key() -> str:
        hashes = ((file.suffix.lower(), file_hash(file)) for file in files)
        return short_hash(place.encoding, place.separator, *hashes, *kinds)

    def read() -> Rows:
        parts = [READERS[file.suffix.lower()](task, f"data.path: '{file}'", file, place) for file in files]
        for file, part in zip(files, parts, strict=True):
            if part.names is not None:
                check_names(task, f"data.path: '{file}'", part.names)
            if part.classes != (known := parts[0].classes):
                own, others = (", ".join(names or ["none"]) for names in (part.classes, known))
                raise UserError(f"data.path: '{file}' has the classes {own}, '{files[0]}' {others}; number them alike")
        rows = [part.rows for part in parts]
        for number, kind in enumerate(kinds):
            rows[number] = map(partial(or_, {KIND: kind}), rows[number])
        return replace(parts[0], rows=chain.from_iterable(rows))

    return Source(where, key, read, files=files)


def kinds_of(files: Iterable[Path]) -> list[int]:
    """Return which kind of text every file has, by its name without numbers: none if all are parts of one kind."""
    names = [re.sub(r"([\W\d_]+of)?[\W\d_]+$", "", file.stem) for file in files]
    places = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [places[name] for name in names] if len(places) > 1 else []


def _refuse_pointers(files: Iterable[Path]) -> None:
    """Refuse a pointer, which Git LFS leaves for a file that was not fetched."""
    for file in filter(is_pointer, files):
        raise UserError(f"data.path: '{file}' is {POINTER}")


def _loaded(task: Task, where: str, load: Callable[[], Any]) -> Sources:
    """Return the sources of splits that the library datasets loads; error messages begin with ``where``."""
    try:
        loaded = load()
    except Exception as error:  # missing or broken files: datasets raises many classes
        reason = str(error.__cause__ or error).strip().split("\n")[0][:160]
        raise UserError(f"{where} cannot be read by the library datasets: {reason}") from error
    sources: Sources = {}
    for split, rows in loaded.items() if isinstance(loaded, dict) else [("train", loaded)]:
        table = rows.data.table.cast(rows.features.arrow_schema)  # with the names of classes
        key = partial(content_key, rows)
        sources[str(split)] = Source(f"{where} split '{split}'", key, partial(from_table, task, table))
    return _as_named(task, where, sources)


def _as_named(task: Task, where: str, splits: Mapping[str, T]) -> dict[str, T]:
    """Return splits by the task's names, of which the exact one wins; a UserError if two others could be one."""
    named = dict[str, str]()
    for split in splits:
        if split != (name := _named(task, split)) and name in splits:
            continue
        if name in named:
            raise UserError(f"{where} holds '{named[name]}' and '{split}', both could be '{name}'; leave one")
        named[name] = split
    return {name: splits[split] for name, split in named.items()}


def _named(task: Task, split: str) -> str:
    """Return the task's name of a split: its first dev split may be plain, MNLI's test split is ``test_matched``."""
    name = re.sub("^dev_", "validation_", DEV.get(split, split))
    return {"validation": task.validation[0], _first_test(task): "test"}.get(name, name)


def _first_test(task: Task) -> str:
    """Return the name of the test split that belongs to the first validation split: MNLI's is ``test_matched``."""
    return task.validation[0].replace("validation", "test")
