"""Data sets in the layout of the hub's repositories: by name, or the folder of a downloaded one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_compress.data.checks import Source
from lit_compress.data.encode import content_key
from lit_compress.data.lines import UTF8
from lit_compress.data.readers import READERS, Rows, from_table, suffix_of
from lit_compress.tasks.records import TASKS, Task
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import POINTER, is_pointer
from lit_compress.utils.hub import (
    Snapshot,
    card_configurations,
    choose_configuration,
    dataset_snapshot,
    is_name,
    texts_in,
)

if TYPE_CHECKING:
    from datasets import Dataset

Sources = dict[str, Source]  # by split
# where such repositories have their tables: parts of a split, folders of splits, a folder of all
_LAYOUTS = ("*-of-*.*", "*/*-of-*.*", "train/*.*", "*/train/*.*", "data/*.*")
_OTHER = {"dev": "validation", "valid": "validation", "val": "validation"}  # names of splits


def located(task: str, path: str | None, revision: str | None, configuration: str | None = None) -> Snapshot | None:
    """Return the data set of the hub that the options name, as a folder; None for local data, and for made data.

    Args:
        task: its name; without a path the task's own data set is meant.
        path: a file or a folder, or ``NAME[@REVISION]``.
        revision: a branch, a tag or a commit of it.
        configuration: of a data set that the task does not know.

    Raises:
        UserError: there is no such data set, it has several configurations, or a revision of local data is given.
    """
    hub = TASKS[task].hub if task in TASKS else None
    if path is not None and "/" in path and is_name(path) and suffix_of(Path(path)) not in READERS:
        return dataset_snapshot("data.path", path, revision, configuration or (hub and hub[1]))
    if path is None and hub is not None:
        return dataset_snapshot("data.task", hub[0], revision, hub[1])
    if revision is not None:
        what = f"'{path}' is no name on the hub" if path else f"the data of '{task}' is not on the hub"
        raise UserError(f"data.revision: '{revision}' is given, but {what}; leave it out (null)")
    return None


def is_repository(folder: Path) -> bool:
    """Return whether a folder is a downloaded repository whose files are not simply called by their splits."""
    if any((folder / f"train{suffix}").is_file() for suffix in READERS):
        return False
    known = card_configurations(folder)
    return bool(known) or any(suffix_of(path) in READERS for pattern in _LAYOUTS for path in folder.glob(pattern))


def read_repository(task: Task, folder: Path, where: str, encoding: str | None = None) -> Sources:
    """Return the splits of a downloaded repository.

    Args:
        task: names the configuration.
        folder: of the repository.
        where: the start of error messages.
        encoding: of text files; None: UTF-8.

    Raises:
        UserError: it has no such configuration, cannot be read, or names files outside of the folder.
    """
    import datasets

    known, wanted = card_configurations(folder), task.configuration or (task.hub and task.hub[1])
    if not known:
        files = files_by_split(folder / wanted if wanted and (folder / wanted).is_dir() else folder)
        return with_test(task, {split: file_source(task, several, encoding) for split, several in files.items()})
    chosen = choose_configuration(where, known, wanted)
    try:
        _check_links(folder, known[str(chosen)])
        # with its files named, those of other configurations, which are not here, are not looked for
        tables = datasets.load_dataset(str(folder), chosen, data_files=known[str(chosen)])
    except UserError:
        raise
    except Exception as error:  # broken or missing files: datasets raises many classes
        reason = str(error.__cause__ or error).strip().split("\n")[0][:160]
        raise UserError(f"{where} cannot be read as a repository of the hub: {reason}") from error
    return sources_of(task, where, {_OTHER.get(str(split), str(split)): rows for split, rows in tables.items()})


def _check_links(folder: Path, data_files: Any) -> None:
    """Refuse a data set whose files are links out of its folder, or out of its place in the hub's cache.

    Args:
        folder: of the data set.
        data_files: of one of its configurations.

    Raises:
        UserError: one is.
    """
    from datasets.data_files import resolve_pattern

    own = folder.resolve()
    roots = [own, *([own.parents[1] / "blobs"] if own.parent.name == "snapshots" else [])]
    for pattern in texts_in(data_files):
        with suppress(FileNotFoundError):
            for path in map(Path, resolve_pattern(pattern, str(folder))):
                if not any(path.resolve().is_relative_to(root) for root in roots):
                    raise UserError(f"data.path: '{path}' is a link to '{path.resolve()}', outside of its data set")


def files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return the tables of a folder without a card by split: ``train-00000-of-00002.parquet``, ``train/0000.parquet``.

    If there are several formats, it is the first one, parquet before others.
    """
    tables = [path for depth in ("*", "*/*", "*/*/*") for path in sorted(folder.glob(depth)) if path.is_file()]
    suffix = next((suffix for suffix in READERS if any(suffix_of(path) == suffix for path in tables)), None)
    by_split: dict[str, list[Path]] = {}
    for path in (path for path in tables if suffix_of(path) == suffix):
        stem = path.name[: -len(suffix_of(path))]
        part, place = re.fullmatch(r"(.+?)-\d+-of-\d+", stem), path.parent.name
        inside = path.parent != folder and place != "data"
        split = part[1] if part else place.removeprefix("partial-") if inside else stem
        by_split.setdefault(_OTHER.get(split, split), []).append(path)
    return by_split


def file_source(task: Task, files: Sequence[Path], encoding: str | None) -> Source:
    """Return the source of the rows in one file or, one after the other, in several."""
    encoding, first = encoding or UTF8, files[0]
    where = f"data.path: '{first}'" if len(files) == 1 else f"data.path: '{first}' and {len(files) - 1} more"

    for file in files:
        refuse_pointer(file)

    def key() -> str:
        return " ".join(_file_key(file, encoding) for file in files)

    def read() -> Rows:
        parts = [READERS[suffix_of(file)](task, f"data.path: '{file}'", file, encoding) for file in files]
        return parts[0] if len(parts) == 1 else replace(parts[0], rows=chain.from_iterable(p.rows for p in parts))

    return Source(where, key, read)


def refuse_pointer(file: Path) -> None:
    """Refuse the pointer that Git LFS leaves for a file that was not fetched.

    Raises:
        UserError: it is that.
    """
    if is_pointer(file):
        raise UserError(f"data.path: '{file}' is {POINTER}")


def _file_key(file: Path, encoding: str) -> str:
    with file.open("rb") as stream:
        return f"{suffix_of(file)} {encoding} {hashlib.file_digest(stream, 'sha256').hexdigest()}"


def sources_of(task: Task, where: str, splits: Mapping[str, Dataset]) -> Sources:
    """Return the sources of splits that the library datasets has read; error messages begin with ``where``."""
    sources: Sources = {}
    for split, rows in splits.items():
        here: Any = f"{where} split '{split}'"
        table = rows.data.table.cast(rows.features.arrow_schema)  # with the names of classes
        sources[split] = Source(here, partial(content_key, rows), partial(from_table, task, here, table))
    return with_test(task, sources)


def first_test(task: Task) -> str:
    """Return the name of the test split that belongs to the first validation split: MNLI's is ``test_matched``."""
    return task.validation[0].replace("validation", "test")


def with_test(task: Task, sources: Sources) -> Sources:
    """Return splits with ``test``, if that has a name of its own."""
    own = first_test(task)
    return {"test": sources[own], **sources} if own in sources and own != "test" else sources
