"""Names on the Hugging Face hub: a name is resolved once, to a commit and a local folder; from then on it is a folder.

The folder is the snapshot in the hub's cache (``HF_HOME``), with the files that are needed here. Later loads, later
stages and later commands with the commit read it and ask nothing. ``HF_HUB_OFFLINE=1`` asks nothing at all.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lit_compress.utils.errors import SHOWN_AS, UserError
from lit_compress.utils.files import card_fields
from lit_compress.utils.hub_errors import refusal
from lit_compress.utils.progress import note

Kind = Literal["model", "dataset"]
CONVERTED = "refs/convert/parquet"  # the revision in which the hub keeps parquet files of data sets with a script
TABLE = re.compile(r".*\.(parquet|arrow|jsonl|json|csv|tsv|txt)(\.gz)?")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
# configurations, tokenizers, code, which runs only if it is trusted, the card
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.codes", "*.py", "README.md")
_ELSEWHERE = ("[!0-9]*/*",)  # the same model for other libraries; modules of sentence-transformers begin with a number


@dataclass(frozen=True)
class Snapshot:
    """A repository of the hub at a commit, in a local folder."""

    name: str
    commit: str
    folder: Path

    @property
    def pinned(self) -> str:
        """``NAME@COMMIT``, which never changes."""
        return f"{self.name}@{self.commit}"


_resolved: dict[tuple[str, ...], Snapshot] = {}


def is_name(text: str) -> bool:
    """Return whether ``text`` can only be a name on the hub, with or without ``@REVISION``: no such file is here."""
    return _NAME.fullmatch(text) is not None and not text.startswith(".") and not Path(text).expanduser().exists()


def split_name(option: str, text: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return name and revision of ``NAME[@REVISION]``.

    Raises:
        UserError: ``revision`` is also given, and differs.
    """
    name, _, own = text.partition("@")
    if own and revision and own != revision:
        raise UserError(f"{option}: '{text}' names a revision, and '{revision}' is given as well; give one of them")
    return name, own or revision


def model_snapshot(option: str, text: str, revision: str | None = None) -> Snapshot:
    """Return a model of the hub as a folder: configuration, tokenizer, card and weights, or all files of an export.

    Args:
        option: which option names it; the start of an error message.
        text: ``NAME`` or ``NAME@REVISION``.
        revision: a branch, a tag or a commit; None: the newest commit of ``main``.

    Raises:
        UserError: the hub has no such model, does not give it, or cannot be reached and the cache does not have it.
    """
    repository = _Repository(option, "model", text, revision)
    if (known := _resolved.get(repository.key)) is not None:
        return known
    repository.resolve()
    folder = repository.files(_TEXTS, _ELSEWHERE)
    names = repository.names(folder)
    weights = weights_among(names)
    if "structure.json" in names:  # of this package
        repository.files(None, (".git*",))
    elif "adapter_config.json" not in names and not ("config.json" in names and weights):
        lacks = "weights for PyTorch" if "config.json" in names else "config.json"
        there = ", ".join([n for n in names if not n.startswith(".git") and n != "README.md"][:5])
        raise UserError(
            f"{option}: '{repository.name}' has no {lacks} on the hub ({there}); give a model with safetensors"
        )
    elif weights:
        repository.files(map(glob.escape, weights))
    return repository.snapshot(folder)


def weights_among(names: Iterable[str]) -> list[str]:
    """Return the files of PyTorch weights in a repository and its modules: safetensors, where there are none pickles.

    >>> weights_among(["model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "2_Dense/pytorch_model.bin"])
    ['model.safetensors', '2_Dense/pytorch_model.bin']
    """
    folders: dict[str, dict[str, list[str]]] = {}
    for name in names:
        path = PurePosixPath(name)
        match = re.fullmatch(r"(model|pytorch_model)(-\d+-of-\d+)?(\.safetensors|\.bin)", path.name)
        if match and re.fullmatch(r"\.|\d+_[^/]*", str(path.parent)):
            folders.setdefault(str(path.parent), {}).setdefault(match[3], []).append(name)
    return [name for files in folders.values() for name in files.get(".safetensors") or files[".bin"]]


def dataset_snapshot(option: str, text: str, revision: str | None = None, configuration: str | None = None) -> Snapshot:
    """Return a data set of the hub as a folder: its card and the files of one configuration.

    No script is run: if a repository has one in place of files, the hub's parquet files of it are taken.

    Args:
        option: which option names it; the start of an error message.
        text: ``NAME`` or ``NAME@REVISION``.
        revision: a branch, a tag or a commit; None: the newest commit of ``main``.
        configuration: its name; None if there is only one.

    Raises:
        UserError: as :func:`model_snapshot`; or it has no such configuration, or no tables.
    """
    repository = _Repository(option, "dataset", text, revision, str(configuration))
    if (known := _resolved.get(repository.key)) is not None:
        return known
    where = f"{option}: '{repository.name}'"
    while True:
        repository.resolve()
        folder = repository.files(("README.md", "dataset_infos.json"))
        names, listed = repository.names(folder), card_configurations(folder)
        if tables := tables_among(names, listed, choose_configuration(where, listed, configuration)):
            return repository.snapshot(repository.files(map(glob.escape, tables)))
        if repository.revision is not None or not any(name.endswith(".py") for name in names):
            break
        note(f"{where} has a script, which is not run; the hub's parquet files of it are read")
        repository.revision = CONVERTED
    raise UserError(f"{where} has no tables (.parquet, .csv, .jsonl); give another data set")


def card_configurations(folder: Path) -> dict[str, Any]:
    """Return the ``data_files`` of the configurations that the card of a downloaded data set names.

    Raises:
        UserError: a file of one is not in the data set: it has an address, or is outside of the folder.
    """
    try:
        listed = card_fields(folder / "README.md").get("configs") or []
    except (OSError, ValueError):
        return {}
    listed = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    for place in texts_in([[entry.get("data_files"), entry.get("data_dir")] for entry in listed]):
        if _NOT_HERE.match(place) or ".." in re.split(r"[/\\]", place):
            raise UserError(f"'{folder}': its README.md names '{place}', which is not in the folder; give files alone")
    return {str(entry.get("config_name")): entry.get("data_files") for entry in listed}


_NOT_HERE = re.compile(r"[/\\~]|.*::|\w[\w+.-]*:")  # an absolute path, a chain of them, a drive or an address


def choose_configuration(where: str, known: Collection[str], wanted: str | None) -> str | None:
    """Return the configuration that is read: the one that is wanted, else the only one, else ``default``.

    Args:
        where: the start of an error message.
        known: names of all; if there are none, ``wanted`` is taken.
        wanted: a configuration, or None.

    Raises:
        UserError: there are several, and none is wanted or called ``default``.
    """
    if wanted in known or not known:
        return wanted
    if len(known) > 1 and "default" not in known:
        no_other = f", none is called '{wanted}'" if wanted else ""
        names = f"{', '.join([*known][:20])}{', ...' * (len(known) > 20)}"
        raise UserError(
            f"{where} has several configurations: {names}{no_other}; choose one with --data.task custom "
            f"--data.custom.configuration {next(iter(known))}"
        )
    return "default" if len(known) > 1 else next(iter(known))


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in ``data_files`` of a card: the patterns, and names of splits that are next to them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def tables_among(names: Iterable[str], known: Mapping[str, Any], configuration: str | None) -> list[str]:
    """Return the files of a configuration: those that the card names, else those in its folder, else all tables."""
    tables = [name for name in names if TABLE.fullmatch(name) and name != "dataset_infos.json"]
    if patterns := list(texts_in(known.get(str(configuration)))):
        return [name for name in names if any(fnmatch(name, pattern.removeprefix("./")) for pattern in patterns)]
    own = [name for name in tables if name.startswith(f"{configuration}/")]
    return own or tables


class _Repository:
    """A repository of the hub at a revision, named ``NAME[@REVISION]``; ``more``: which part of it is read."""

    def __init__(self, option: str, kind: Kind, text: str, revision: str | None, *more: str) -> None:
        self.option, self.kind = option, kind
        self.name, self.revision = split_name(option, text, revision)
        self.key: tuple[str, ...] = (kind, self.name, str(self.revision), *more)
        self.commit: Any = None  # of huggingface_hub: a text that also knows its revision

    def resolve(self) -> None:
        """Find the commit; a commit is not asked for, and without an answer it is the newest one that was seen."""
        from huggingface_hub import HfApi

        with self._asking():
            self.commit = HfApi().resolve_revision(self.name, repo_type=self.kind, revision=self.revision)

    def names(self, folder: Path) -> list[str]:
        """Return the names of all files; those that are in the folder if the cache has no list."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return [f.path for f in get_cached_repo_tree(self.name, repo_type=self.kind, revision=self.commit.resolved)]
        except CachedRepoTreeNotFoundError:
            return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def files(self, allow: Iterable[str] | None, ignore: tuple[str, ...] = ()) -> Path:
        """Return the folder of the snapshot, with the files that fit; those that are there are not asked for."""
        from huggingface_hub import snapshot_download

        with self._asking():
            return Path(
                snapshot_download(
                    self.name, repo_type=self.kind, revision=self.commit, ignore_patterns=list(ignore),
                    allow_patterns=None if allow is None else list(allow),
                )
            )  # fmt: skip

    def snapshot(self, folder: Path) -> Snapshot:
        """Return the folder with its commit, and remember it for this process."""
        SHOWN_AS[str(folder)] = self.name
        made = Snapshot(self.name, self.commit.resolved, folder)
        kind, name, _, *more = self.key
        return _resolved.setdefault(self.key, _resolved.setdefault((kind, name, made.commit, *more), made))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn the library's errors into one line."""
        try:
            yield
        except Exception as error:  # the library raises dozens of classes
            raise UserError(f"{self.option}: {refusal(error, self.name, self.kind, self.revision)}") from error
