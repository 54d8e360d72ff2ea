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
from pathlib import Path
from typing import Any, Literal

from lit_compress.utils.errors import SHOWN_AS, UserError
from lit_compress.utils.files import card_fields

Kind = Literal["model", "dataset"]
WHAT: dict[Kind, str] = {"model": "model", "dataset": "data set"}
TABLE = re.compile(r".*\.(parquet|arrow|jsonl|json|csv|tsv|txt)")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
# class of an error of huggingface_hub -> what to do
_ADVICE = {
    "GatedRepoError": "it is gated; ask for access on its page, then log in with `hf auth login`",
    "RepositoryNotFoundError": "there is no folder and no {what} of this name, or {log_in}",
    "RevisionNotFoundError": "it has no such revision; give a branch, a tag or a commit of it",
    "HFValidationError": "it is no folder, and no name on the hub; give a folder, or OWNER/NAME",
}
# configurations, tokenizers, the code of an export, the card
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.codes", "*.py", "README.md")
_ELSEWHERE = ("[!0-9]*/*",)  # the same model for other libraries; modules of sentence-transformers begin with a number
_NOT_HERE = re.compile(r"[/\\~]|.*::|\w[\w+.-]*:")  # an absolute path, a chain of them, a drive or an address


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


_resolved: dict[tuple[str | None, ...], Snapshot] = {}  # of this process, by kind, name and revision or commit


def is_name(text: str) -> bool:
    """Return whether ``text`` can only be a name on the hub, with or without ``@REVISION``: no such file is here."""
    return _NAME.fullmatch(text) is not None and not text.startswith(".") and not Path(text).expanduser().exists()


def can_be_a_repository(name: str) -> bool:
    """Return whether the hub accepts a repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def split_name(option: str, text: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return name and revision of ``NAME[@REVISION]``.

    Raises:
        UserError: ``revision`` is also given, and differs.
    """
    name, _, own = text.partition("@")
    if own and revision and own != revision:
        raise UserError(f"{option}: '{text}' names a revision, and '{revision}' is given as well; give one of them")
    return name, own or revision


def model_snapshot(option: str, text: str) -> Snapshot:
    """Return a model of the hub as a folder: configuration, tokenizer, card and weights, or all files of an export.

    Args:
        option: start of an error message.
        text: ``NAME`` or ``NAME@REVISION``, a branch, a tag or a commit; without it the newest of ``main``.

    Raises:
        UserError: the hub has no such model, does not give it, or cannot be reached and the cache does not have it.
    """
    name, revision = split_name(option, text)
    if (known := _resolved.get(("model", name, revision))) is not None:
        return known
    with _asking(option, name, "model", revision) as commit:
        folder, names = _download(name, "model", commit, _TEXTS, _ELSEWHERE)
        weights, adapter = weights_among(names), "adapter_config.json" in names
        if "structure.json" in names:  # of this package
            _download(name, "model", commit, None, (".git*",))
        elif weights and (adapter or "config.json" in names):
            _download(name, "model", commit, [*map(glob.escape, weights)])
        elif not adapter:
            lacks = "weights for PyTorch" if "config.json" in names else "config.json"
            there = ", ".join([n for n in names if not n.startswith(".git") and n != "README.md"][:5])
            raise UserError(f"{option}: '{name}' has no {lacks} on the hub ({there}); give a model with safetensors")
        return _keep(name, commit, folder, "model", revision)


def weights_among(names: Iterable[str]) -> list[str]:
    """Return the files of PyTorch weights in a repository: safetensors, where there are none pickles.

    >>> weights_among(["model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "2_Dense/pytorch_model.bin"])
    ['model.safetensors']
    """
    found = list(filter(re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)").fullmatch, names))
    return [name for name in found if name.endswith(".safetensors")] or found


def dataset_snapshot(
    option: str, text: str, revision: str | None = None, configuration: str | None = None, usual: str | None = None
) -> Snapshot:
    """Return a data set of the hub as a folder: its card and the files of one configuration; no script is run.

    Arguments as :func:`model_snapshot`, the ``revision`` may be given alone; ``configuration`` and ``usual``
    are as of :func:`choose_configuration`.

    Raises:
        UserError: as :func:`model_snapshot`; or it has no such configuration, or no tables.
    """
    name, revision = split_name(option, text, revision)
    where = f"{option}: '{name}'"
    if (known := _resolved.get(("dataset", name, revision, configuration, usual))) is not None:
        return known
    with _asking(option, name, "dataset", revision) as commit:
        folder, names = _download(name, "dataset", commit, ("README.md", "dataset_infos.json"))
        listed = card_configurations(folder)
        if tables := tables_among(names, listed, choose_configuration(where, listed, configuration, usual)):
            folder, _ = _download(name, "dataset", commit, [*map(glob.escape, tables)])
            return _keep(name, commit, folder, "dataset", revision, configuration, usual)
        script = any(file.endswith(".py") for file in names)
        other = f"the hub may have those of its script: {name}@refs/convert/parquet" if script else "give another one"
        raise UserError(f"{where} has no tables (.parquet, .csv, .jsonl); {other}")


def card_configurations(folder: Path) -> dict[str, Any]:
    """Return the ``data_files`` of the configurations that a data set's card names; refuse those outside of it."""
    try:
        listed = card_fields(folder / "README.md").get("configs") or []
    except (OSError, ValueError):
        return {}
    listed = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    for place in texts_in([[entry.get("data_files"), entry.get("data_dir")] for entry in listed]):
        if _NOT_HERE.match(place) or ".." in re.split(r"[/\\]", place):
            raise UserError(f"'{folder}': its README.md names '{place}', which is not in the folder; give files alone")
    return {str(entry.get("config_name")): entry.get("data_files") for entry in listed}


def choose_configuration(
    where: str, known: Collection[str], wanted: str | None, usual: str | None = None
) -> str | None:
    """Return which of the ``known`` configurations is read: the one that the user has ``wanted``.

    Without it the ``usual`` one, else ``default``, else the only one. If none is known, the named one is taken.
    """
    if not known:
        return wanted or usual
    likely = [wanted] if wanted else [usual, "default", *(known if len(known) == 1 else ())]
    if (chosen := next((name for name in likely if name in known), None)) is not None:
        return chosen
    names = ", ".join(known) + (f", none is called '{wanted}'" if wanted else "")
    choose = f"choose one with --data.task custom --data.custom.configuration {next(iter(known))}"
    count = "several configurations" if len(known) > 1 else "one configuration"
    raise UserError(f"{where} has {count}: {names}; {choose}")


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


def _download(
    name: str, kind: Kind, commit: Any, allow: Collection[str] | None, ignore: Collection[str] = ()
) -> tuple[Path, list[str]]:
    """Return the folder of a snapshot, with the files that fit, and the names of all files of the repository."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    wanted: Any = {"repo_type": kind, "revision": commit, "allow_patterns": allow, "ignore_patterns": ignore}
    folder = Path(snapshot_download(name, **wanted))
    try:
        return folder, [file.path for file in get_cached_repo_tree(name, repo_type=kind, revision=commit.resolved)]
    except CachedRepoTreeNotFoundError:  # the cache has no list
        return folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _keep(name: str, commit: Any, folder: Path, kind: Kind, revision: str | None, *more: str | None) -> Snapshot:
    SHOWN_AS[str(folder)] = name
    made = _resolved.setdefault((kind, name, commit.resolved, *more), Snapshot(name, commit.resolved, folder))
    return _resolved.setdefault((kind, name, revision, *more), made)


@contextmanager
def _asking(option: str, name: str, kind: Kind, revision: str | None) -> Iterator[Any]:
    """Give the commit of a revision, without an answer the newest one seen; the library's errors become one line."""
    from huggingface_hub import HfApi

    try:
        yield HfApi().resolve_revision(name, repo_type=kind, revision=revision)
    except UserError:
        raise
    except Exception as error:  # the library raises dozens of classes
        text = f"{name}@{revision}" if revision else name
        why = _reason_of(error, kind)
        raise UserError(f"{option}: cannot load the {WHAT[kind]} '{text}' from the hub: {why}") from error


def _reason_of(error: BaseException, kind: Kind) -> str:
    """Return in one line why the hub refused or did not answer: advice, or its own words."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    classes = [base.__name__ for one in chain for base in type(one).__mro__]
    if advice := next((advice for name, advice in _ADVICE.items() if name in classes), None):
        log_in = "your token may not read it" if get_token() else "it is private: log in with `hf auth login`"
        return advice.format(what=WHAT[kind], log_in=log_in)
    error = next((one for one in chain if hasattr(one, "server_message")), chain[-1])
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = (getattr(error, "server_message", None) or " ".join(str(error).split()))[:200]
    if status == 401:
        return "the token is invalid or has expired; `hf auth login` takes a new one, and HF_TOKEN goes before it"
    reason = f"status {status}: {said}" if status else said
    if is_offline_mode() and not status:
        reason = "HF_HUB_OFFLINE is set, and the cache does not have all of it"
    files = {"model": "the folder of a downloaded model", "dataset": "files with --data.path"}
    return f"{reason}; without network give {files[kind]}"
