"""Copies of an export, in another folder or on the Hugging Face hub: known files, no link out of the folder."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from lit_compress.export.card import for_repository
from lit_compress.export.modelling import MODULE
from lit_compress.models.own_code import brings_code
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import reason_of
from lit_compress.utils.manifest import MANIFEST, write_manifest
from lit_compress.utils.progress import note

PROGRAMS = (
    "model.onnx", "model.onnx.data", "model.pt2", "openvino_model.xml", "openvino_model.bin", "decode.*", "encode.*",
    "write.py", "writing.json",
)  # fmt: skip
_KNOWN = (
    *PROGRAMS, "config.json", "generation_config.json", "structure.json", "report.json", "README.md", "LICENSE*",
    f"{MODULE}.py", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors", "bench.json", "bench.png", "alternatives.png",
)  # fmt: skip


def export_files(what: str, folder: Path) -> dict[str, Path]:
    """Return the files of an export by their name relative to its folder, without the manifest; a note names others.

    Links of the hub's cache, from a snapshot to the blobs of the same repository, are files like any other.

    Args:
        what: option and value, the start of messages.
        folder: of the export.

    Raises:
        UserError: a link leads out of the folder, or to a folder.
    """
    known, others = (*_KNOWN, *["*.py"] * brings_code(folder)), []
    files: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent) / name for name in sorted([*folders, *names])):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() and (path.is_dir() or not _stays(path, folder)):
                raise UserError(
                    f"{what}: '{name}' is a link to '{path.resolve()}'; only links to files in the folder are copied; "
                    "remove it"
                )
            if path.is_dir():
                continue
            if any(fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in known):
                files[name] = path
            elif name != MANIFEST and not path.name.startswith("."):
                others.append(name)
    if others:
        note(f"{what}: files that no export has are left out: {', '.join(sorted(others)[:5])}")
    return files


def _stays(link: Path, folder: Path) -> bool:
    """Return whether a link leads to a file in its folder, or to a blob of the same repository in the hub's cache."""
    end, top = link.resolve(), folder.resolve()
    repository = top.parent.parent
    return end.is_relative_to(top) or (top.parent.name == "snapshots" and end.parent == repository / "blobs")


def copy_export(what: str, folder: Path, to: Path) -> None:
    """Copy the files of an export into another existing folder, with a manifest of the copies.

    Raises:
        UserError: as :func:`export_files`.
    """
    for name, path in export_files(what, folder).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to / name)
    write_manifest(to)


def check_repository(name: str) -> None:
    """Refuse an invalid name of a repository.

    Raises:
        UserError: it cannot.

    >>> check_repository("me/small model")
    Traceback (most recent call last):
    lit_compress.utils.errors.UserError: push_to_hub: 'me/small model' is no name of a repository; e.g. me/small-model
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        parts = ["".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in p) for p in name.split("/")]
        near = "/".join([part.strip("-.") or "small" for part in parts][-2:])
        raise UserError(f"push_to_hub: '{name}' is no name of a repository; e.g. {near}") from error


def check_push(name: str, private: bool = False) -> bool:
    """Refuse, before the work, a push that cannot succeed; return whether the repository is there already.

    Args:
        name: ``USER/NAME``; without USER the user of the token.
        private: whether the repository is to be private.

    Raises:
        UserError: the name, the token or the network cannot be used, or a public repository would have to be private.
    """
    check_repository(name)
    api = HfApi()
    try:
        user = api.whoami()
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(f"push_to_hub: the token of '{user['name']}' may only read; give one that may write")
        name = name if "/" in name else f"{user['name']}/{name}"
        there = api.model_info(name)
    except RepositoryNotFoundError:
        return False
    except UserError:
        raise
    except Exception as error:  # no network, no token, refused: the library raises dozens of classes
        raise UserError(f"push_to_hub: cannot upload to '{name}': {reason_of(error)}; nothing is written") from error
    if private and not there.private:
        raise UserError(
            f"push_to_hub: '{name}' is public, and --private asks for a private one; make it private on the hub, "
            "or give another name"
        )
    return True


def push(folder: Path, name: str, private: bool = False, kept: str | None = None) -> str:
    """Upload the files of an export and their manifest, and return the address of the repository.

    The repository is made if it is missing.

    It is one commit, which also deletes files that the folder does not have. A repository that was made for a push that
    fails is removed.

    Args:
        folder: of the export.
        name: ``USER/NAME``; without USER the user of the token.
        private: whether a new repository is private.
        kept: an error's words for the place of the export; None: ``folder``.

    Raises:
        UserError: as :func:`check_push`; or a link leads out of the folder, or the hub refuses the files; the folder
            stays.
    """
    files = export_files(f"push_to_hub: '{folder}'", folder)
    there, api, made = check_push(name, private), HfApi(), None
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        made = None if there else address.repo_id
        with tempfile.TemporaryDirectory() as work:
            for file, path in files.items():
                place = Path(work) / file
                place.parent.mkdir(parents=True, exist_ok=True)
                if place == Path(work) / "README.md":
                    place.write_text(for_repository(path.read_text(), address.repo_id))
                else:
                    place.symlink_to(path.resolve())
            write_manifest(Path(work))
            api.upload_folder(
                repo_id=address.repo_id, folder_path=work, commit_message="Export of lit_compress", delete_patterns="*"
            )
    except Exception as error:
        if made is not None:
            with suppress(Exception):  # the reason of the push is what is told
                api.delete_repo(made)
        where = kept or f"the export is in '{folder}', `hf upload` also uploads it"
        raise UserError(f"push_to_hub: cannot upload to '{name}': {reason_of(error)}; {where}") from error
    return str(address)
