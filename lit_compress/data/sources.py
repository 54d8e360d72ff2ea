"""The sources of splits: a folder of files, the hub, or the package itself.

From every source a split becomes a dataset with the task's text columns and, if the rows have labels, the label
column, as the type of task stores it: a class number, a float, ... Rows are counted from 1, without a header.
They are read in chunks and written to the cache folder, so that memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lit_compress.data.checks import Source, checked
from lit_compress.data.lines import check_encoding
from lit_compress.data.readers import READERS, Rows, check_suffix, suffix_of
from lit_compress.data.repository import (
    Sources,
    file_source,
    first_test,
    is_repository,
    located,
    read_repository,
    refuse_pointer,
    sources_of,
)
from lit_compress.models.embedded import load_texts
from lit_compress.tasks.records import Task
from lit_compress.utils.cache import short_hash
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from datasets import Dataset

CUSTOM = "custom"  # the task whose record data/custom.py makes
ALL = "all"  # name of a split with every row of a single file


def _names(task: Task, split: str) -> list[str]:
    """Return the file names, without suffix, for ``split``; the first validation split may also be ``validation``.

    The test split of a task with several validation splits may be called like the first: ``test_matched``.
    """
    plain = ["validation"] if split == task.validation[0] else []
    own = [first_test(task)] if split == "test" else []
    names = [split, *plain, *own]
    return list(dict.fromkeys([*names, *(name.replace("validation", "dev") for name in names)]))


def find_split(task: Task, path: str, split: str) -> Path | None:
    """Return the file of ``split`` in the folder ``path``, None if there is none.

    Raises:
        UserError: there is no such folder, or it has two files for the split.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "no such folder or file"
        raise UserError(f"data.path: '{path}': {kind}; give a folder with train and validation files")
    files = [folder / f"{name}{suffix}" for name in _names(task, split) for suffix in READERS]
    there = [file for file in files if file.is_file()]
    if len(there) > 1:
        raise UserError(
            f"data.path: '{path}' holds {' and '.join(file.name for file in there)}, both could be '{split}'; leave one"
        )
    return there[0] if there else None


def has_split(task: Task, path: str | None, split: str, revision: str | None = None) -> bool:
    """Return whether ``split`` exists; the rest as :func:`load_split_files`.

    Raises:
        UserError: as :func:`load_split_files`, for the folder or the hub.
    """
    if path is not None and (task.name == CUSTOM or _is_whole(path)):
        return split in custom_sources(task, path, [split])
    if path is not None and find_split(task, path, split) is not None:
        return True
    return split in _whole_sources(task, path, revision)


def _is_whole(path: str) -> bool:
    """Return whether a path is a single file, or a folder that ``save_to_disk`` of the library datasets wrote."""
    place = Path(path).expanduser()
    return place.is_file() or _is_saved(place)


def is_one_table(place: Path) -> bool:
    """Return whether a path is one table without splits: a file, or one dataset that ``save_to_disk`` wrote."""
    return place.is_file() or (_is_saved(place) and not (place / "dataset_dict.json").is_file())


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def load_split_files(
    task: Task,
    path: str | None,
    splits: Iterable[str] | None = None,
    labelled: bool = True,
    seed: int = 0,
    encoding: str | None = None,
    whole: bool = False,
    optional: Collection[str] = (),
    revision: str | None = None,
) -> dict[str, Dataset]:
    """Read splits of ``task`` from ``path``; without one from the hub, or from the package.

    Args:
        task: names the columns, the labels and the splits.
        path: a folder with ``train`` and ``validation`` (or ``dev``) and ``test`` files, as .parquet, .jsonl, .json,
            .csv, .tsv or .txt (one text a line, without labels); a downloaded repository; or a single file.
        splits: to read; None: ``train`` and all of ``task.validation``.
        labelled: the splits must have labels; else a split without them has no label column.
        seed: decides the splits if all rows are in one file.
        encoding: of text files; None: UTF-8.
        whole: every split is all rows of a single file.
        optional: splits that may have no labels although the others must.
        revision: of the task's data set on the hub; None: the newest.

    Returns:
        The splits by name; ``task.validation`` after the first only if they exist.

    Raises:
        UserError: the folder, a file, a column or a row is not usable; the message names it.
    """
    wanted = list(splits) if splits is not None else ["train", *task.validation]
    if encoding is not None:
        _check_encoding(encoding, path)
    if path is not None and (task.name == CUSTOM or _is_whole(path)):
        sources = custom_sources(task, path, wanted, encoding, whole, seed)
    elif path is not None and not is_repository(Path(path).expanduser()):
        sources = _local(task, path, wanted, encoding)
    else:
        sources = _whole_sources(task, path, revision, encoding)
    loaded = {}
    for split in wanted:
        if split in sources:
            own = first_test(task)
            if split == "test" != own and f"{own}" in sources[split].where:
                note(f"{sources[split].where} is read as the test split")
            loaded[split] = checked(task, sources[split], labelled, split in optional)
        elif split not in task.validation[1:]:
            raise UserError(f"data.task: '{task.name}' has no split '{split}'; {nearest(split, sources)}")
    return loaded


# ------------------------------------------------------------------------------------------- sources


def _check_encoding(encoding: str, path: str | None) -> None:
    """Refuse an encoding that is none, or of nothing.

    Raises:
        UserError: it is.
    """
    check_encoding(encoding)
    if path is None:
        raise UserError(f"data.encoding: {encoding} is for files; give --data.path, or leave it out")


def _local(task: Task, path: str, wanted: list[str], encoding: str | None) -> Sources:
    """Return the files of the splits ``wanted``; a missing one is an error, except a second validation split."""
    sources: Sources = {}
    for split in wanted:
        file = find_split(task, path, split)
        if file is not None:
            sources[split] = file_source(task, [file], encoding)
        elif split not in task.validation[1:]:
            names, suffixes = "|".join(_names(task, split)), "|".join(end for end in READERS if not end.endswith(".gz"))
            there = sorted(Path(path).expanduser().iterdir())
            ending = there[0].suffix if there else ""
            near = nearest(split + ending, (entry.name for entry in there)) if there else "the folder is empty"
            raise UserError(
                f"data.path: '{path}' has no file for the split '{split}'; looked for ({names})({suffixes}), {near}"
            )
    return sources


# splits without a file -> the part of the training file that each split gets
_PARTS = {
    ("validation", "test"): {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)},
    ("validation",): {"train": (0.0, 0.9), "validation": (0.9, 1.0)},
}


def custom_sources(
    task: Task, path: str, wanted: Iterable[str], encoding: str | None = None, whole: bool = False, seed: int = 0
) -> Sources:
    """Return the splits ``wanted`` of the user's own data; those without a file are parts of the training file.

    Args:
        task: has the names of the columns.
        path: a file, or a folder with ``train``, or one written by ``save_to_disk`` of the library datasets.
        wanted: names of splits, or ``all`` for every row of one table.
        encoding: of text files; None: UTF-8.
        whole: every split is all rows of one table.
        seed: of the choice of the parts.

    Raises:
        UserError: ``path`` is none of these.
    """
    place = Path(path).expanduser()
    if place.is_file():
        check_suffix(f"data.path: '{path}'", place)
        sources = {"train": file_source(task, [place], encoding)}
    elif _is_saved(place):
        sources = _saved(task, place)
    else:
        files = {split: find_split(task, path, split) for split in ("train", "validation", "test")}
        sources = {split: file_source(task, [file], encoding) for split, file in files.items() if file is not None}
        if not sources and is_repository(place):
            sources = read_repository(task, place, f"data.path: '{path}'", encoding)
        if not sources:
            raise UserError(f"data.path: '{path}' has no file for train, validation or test; {_there(place)}")
    if is_one_table(place) and (whole or ALL in wanted):
        return dict.fromkeys((split for split in wanted if split not in task.validation[1:]), sources["train"])
    missing = tuple(split for split in ("validation", "test") if split not in sources)
    if missing in _PARTS and "train" in sources:
        rows = sources["train"]
        sources |= {split: replace(rows, part=part, seed=seed, split=split) for split, part in _PARTS[missing].items()}
    if "validation" in sources and task.validation[0] != "validation":  # MNLI
        sources[task.validation[0]] = sources.pop("validation")
    return sources


def _there(folder: Path) -> str:
    """Return what a folder without known files holds, as the end of an error message."""
    if part := next((path for path in sorted(folder.glob("*=*/*")) if suffix_of(path) in READERS), None):
        return f"it is a table in parts by value ({part.parent.name}); write it as one file"
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "it is empty"


def _saved(task: Task, folder: Path) -> Sources:
    """Return the splits of a folder that ``save_to_disk`` wrote; a single dataset is ``train``."""
    import datasets

    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        refuse_pointer(file)
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # missing or broken files: datasets raises many classes
        raise UserError(f"data.path: '{folder}' is no readable dataset: {str(error).splitlines()[0][:160]}") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    return sources_of(task, f"data.path: '{folder}'", {str(split): rows for split, rows in splits.items()})


def _embedded(task: Task) -> Sources:
    """Return the splits of a task whose data the package makes."""
    return {
        split: Source(
            f"data.task: '{task.name}' split '{split}'",
            partial(short_hash, rows),
            partial(Rows, list(rows[0]), iter(rows)),
        )
        for split, rows in load_texts(task).items()
    }


def _whole_sources(task: Task, path: str | None, revision: str | None, encoding: str | None = None) -> Sources:
    """Return all splits of data that is not a folder of files: a downloaded repository, the hub's, or made here."""
    if path is not None:
        folder = Path(path).expanduser()
        return read_repository(task, folder, f"data.path: '{path}'", encoding) if is_repository(folder) else {}
    if (repository := located(task.name, None, revision)) is None:
        return _embedded(task)
    return read_repository(task, repository.folder, f"data.task: '{task.name}'")
