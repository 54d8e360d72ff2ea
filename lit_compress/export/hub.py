"""Upload of an export to the Hugging Face hub; without a network or a token nothing else is lost."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from lit_compress.utils.errors import UserError


def check_repository(name: str) -> None:
    """Refuse, before the work, what cannot be the name of a repository.

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


def push(folder: Path, name: str, private: bool = False, kept: str | None = None) -> str:
    """Upload all files of an export, and return the address of the repository, which is made where it is missing.

    Args:
        folder: of the export.
        name: ``USER/NAME``; without USER the user of the token.
        private: whether a new repository is private.
        kept: what an error says of where the export is; None: in ``folder``.

    Raises:
        UserError: the hub cannot be reached, there is no token, or the hub refuses it; the folder stays.
    """
    check_repository(name)
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Export of lit_compress")
    except Exception as error:  # no network, no token, refused: the library raises dozens of classes
        reason = next((line for line in map(str.strip, str(error).split("\n")) if line), "")[:160]
        raise UserError(
            f"push_to_hub: cannot upload to '{name}' ({type(error).__name__}: {reason}); log in with `hf auth login`; "
            + (kept or f"the export is in '{folder}', `hf upload` uploads it, too")
        ) from error
    return str(address)
