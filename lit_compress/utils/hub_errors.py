"""Reason of a failed request to the Hugging Face hub, and advice: one line for dozens of classes of errors."""

from __future__ import annotations

import re


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, or its status, in a few words."""
    status = _status(error)
    if told := {429: "too many requests"}.get(status, "its server fails" if status >= 500 else ""):
        return f"status {status}, {told}"
    first = next((line for line in map(str.strip, str(error).split("\n")) if line), "")
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__


def _cause(error: BaseException) -> BaseException:
    """Return the answer or the failure that an error about the cache stands for."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    first: BaseException | None = error
    while first is not None:
        if isinstance(first, HfHubHTTPError | OfflineModeIsEnabled) or type(first).__module__.startswith("httpx"):
            return first
        first = first.__cause__
    return error


def refusal(error: BaseException, name: str, kind: str = "model", revision: str | None = None) -> str:
    """Return a line on a repository that cannot be read or written, with the reason and advice that fits it.

    Args:
        error: of the library ``huggingface_hub``.
        name: of the repository.
        kind: ``model`` or ``dataset``.
        revision: that was asked for.
    """
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT, is_offline_mode
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    what = "data set" if kind == "dataset" else "model"
    folder = "files with --data.path" if kind == "dataset" else "the folder of a downloaded model"
    cannot = f"cannot load the {what} '{name}' from the hub"
    cause = _cause(error)
    text, status = str(cause), _status(cause)
    if isinstance(cause, GatedRepoError):
        page = f"{ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        then = "it is granted to the owner of the token" if get_token() else "then log in with `hf auth login`"
        return f"{cannot}: it is gated; ask for access at {page}, {then}"
    if status == 401 and (get_token() or "invalid credentials" in text.lower()) and "Repository" not in text:
        return f"{cannot}: {BAD_TOKEN}"
    if isinstance(cause, RevisionNotFoundError):
        return f"{cannot}: it has no revision '{revision}'; give a branch, a tag or a commit of it"
    if isinstance(cause, RepositoryNotFoundError):
        who = "your token may not read it" if get_token() else "it is private: log in with `hf auth login`"
        return f"{cannot}: there is no folder and no {what} of this name, or {who}"
    if isinstance(cause, HFValidationError):
        return f"'{name}' is no folder, and no name on the hub; give a folder, or OWNER/NAME"
    if status == 403:
        return f"{cannot}: your token may not read it ({_first(text)})"
    if is_offline_mode() and status == 0:
        return f"{cannot}: HF_HUB_OFFLINE is set, and the cache does not have all of it; without network give {folder}"
    return f"{cannot} ({reason_of(cause)}), and there is no folder '{name}' here; without network give {folder}"


def refused_push(error: BaseException, name: str) -> str:
    """Return a line on an upload that failed, with the reason and advice that fits it."""
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import LocalTokenNotFoundError

    cannot, cause = f"cannot upload to '{name}'", _cause(error)
    text, status = str(cause), _status(cause)
    if isinstance(error, LocalTokenNotFoundError):
        return f"{cannot}: there is no token; log in with `hf auth login`, or set HF_TOKEN"
    if status == 401:
        return f"{cannot}: {BAD_TOKEN}"
    if status == 403:
        return f"{cannot}: your token may not write there ({_first(text)})"
    if "metadata in README.md" in str(error):
        return f"{cannot}: the hub refuses the card: {_first(str(error))}"
    if is_offline_mode() and status == 0:
        return f"{cannot}: HF_HUB_OFFLINE is set"
    return f"{cannot} ({reason_of(cause)})"


BAD_TOKEN = "the token is invalid or has expired; `hf auth login` takes a new one, and HF_TOKEN goes before it"


def _first(text: str) -> str:
    """Return the sentence of the hub in an error, without its number and its address."""
    lines = [re.sub(r"\s*\(Request ID.*?\)", "", line).strip() for line in text.split("\n") if line.strip()]
    own = ("Client error", "For ", "Bad request", "Cannot access content", "Make sure", "Invalid metadata")
    plain = [line.lstrip("- ") for line in lines if not line.startswith(own)]
    return (plain or lines or [""])[0].removeprefix("403 Forbidden: ")[:200]
