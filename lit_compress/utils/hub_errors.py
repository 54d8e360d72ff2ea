"""Reason of a failed request to the Hugging Face hub, and advice: one line for dozens of classes of errors."""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """Return why the hub did not answer, in its own words where it has some."""
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    first: BaseException | None = error  # an error about the cache stands for another one
    while first is not None:
        if isinstance(first, HfHubHTTPError | OfflineModeIsEnabled) or type(first).__module__.startswith("httpx"):
            error = first
            break
        first = first.__cause__
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    said = getattr(error, "server_message", None) or " ".join(str(error).split())
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token; log in with `hf auth login`, or set HF_TOKEN"
    if status == 401:
        return "the token is invalid or has expired; `hf auth login` takes a new one, and HF_TOKEN goes before it"
    if status == 403:
        return f"your token may not do this ({said[:200]})"
    if is_offline_mode() and status == 0:
        return "HF_HUB_OFFLINE is set, and the cache does not have all of it"
    return f"status {status}: {said[:200]}" if status else f"{type(error).__name__}: {said[:200]}"


def refusal(error: BaseException, name: str, kind: str = "model", revision: str | None = None) -> str:
    """Return a line on a repository that cannot be read, with the reason and advice that fits it.

    Args:
        error: of the library ``huggingface_hub``.
        name: of the repository.
        kind: ``model`` or ``dataset``.
        revision: that was asked for.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    what = "data set" if kind == "dataset" else "model"
    log_in = "your token may not read it" if get_token() else "it is private: log in with `hf auth login`"
    known = {
        GatedRepoError: "it is gated; ask for access on its page, then log in with `hf auth login`",
        RevisionNotFoundError: f"it has no revision '{revision}'; give a branch, a tag or a commit of it",
        RepositoryNotFoundError: f"there is no folder and no {what} of this name, or {log_in}",
        HFValidationError: "it is no folder, and no name on the hub; give a folder, or OWNER/NAME",
    }
    cause = error.__cause__ if isinstance(error.__cause__, tuple(known)) else error
    if (reason := next((told for of, told in known.items() if isinstance(cause, of)), None)) is None:
        folder = "files with --data.path" if kind == "dataset" else "the folder of a downloaded model"
        reason = reason_of(error)
        reason += "" if "token" in reason else f"; without network give {folder}"
    return f"cannot load the {what} '{name}' from the hub: {reason}"
