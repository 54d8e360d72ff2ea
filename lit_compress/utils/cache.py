"""The cache folder: variable ``LIT_COMPRESS_CACHE``, else ``~/.cache/lit_compress``; all in it can be made again."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lit_compress.utils.errors import UserError


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    return Path(os.environ.get("LIT_COMPRESS_CACHE") or "~/.cache/lit_compress").expanduser()


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it does not exist, let ``fill`` write a temporary folder and rename that.

    A killed process leaves no half-written folder; of two processes at the same time the first one's folder stays.

    Raises:
        UserError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        temporary.chmod(0o755)  # mkdtemp hides it from the other users of a shared cache
    except OSError as error:
        raise UserError(
            f"LIT_COMPRESS_CACHE: cannot write to '{folder.parent}' ({error.strerror}); give a folder you own"
        ) from error
    try:
        fill(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def short_hash(*parts: object) -> str:
    """Return 16 hexadecimal digits, a hash of the ``repr`` of all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
