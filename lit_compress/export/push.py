"""Upload of an export to the Hugging Face hub; without a network or a token nothing else is lost."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from lit_compress.export.card import for_repository
from lit_compress.export.copying import export_files
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub_errors import refused_push
from lit_compress.utils.manifest import write_manifest


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
        raise UserError(f"push_to_hub: {refused_push(error, name)}; nothing is written") from error
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
        raise UserError(f"push_to_hub: {refused_push(error, name)}; {where}") from error
    return str(address)
