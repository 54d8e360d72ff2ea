"""The cache folder: variable ``LIT_COMPRESS_CACHE``, else ``~/.cache/lit_compress``; all in it can be made again.

Every entry is a folder with a ``manifest.json`` (utils/manifest.py). An entry that differs from it, e.g. after a full
disk or a crash of the machine, is made again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import MANIFEST, difference, write_manifest
from lit_compress.utils.progress import note

DAY = 24 * 3600


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    return Path(os.environ.get("LIT_COMPRESS_CACHE") or "~/.cache/lit_compress").expanduser()


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it does not exist or is broken, let ``fill`` write a temporary folder and rename that.

    A killed process leaves no half-written folder; of two processes at the same time the first one's folder stays.

    Raises:
        UserError: the cache cannot be written.
    """
    if folder.is_dir():
        if _is_whole(folder):
            return folder
        if (folder / MANIFEST).is_file():  # else an earlier version wrote it
            note(f"the cache entry '{folder}' is broken; it is made again")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        temporary.chmod(0o755)  # mkdtemp hides it from the other users of a shared cache
    except OSError as error:
        raise UserError(
            f"LIT_COMPRESS_CACHE: cannot write to '{folder.parent}' ({error.strerror}); give a folder you own"
        ) from error
    try:
        fill(temporary)
        write_manifest(temporary)
        if folder.is_dir() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _remove_left_behind(folder: Path) -> None:
    """Remove a killed process's leftovers of an entry after a day; younger ones may still be in the making."""
    for path in folder.parent.glob(f".{folder.name}-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                shutil.rmtree(path, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Return whether the files of an entry are those that were written."""
    return (folder / MANIFEST).is_file() and difference(folder) is None


def short_hash(*parts: object) -> str:
    """Return 16 hexadecimal digits, a hash of the ``repr`` of all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
