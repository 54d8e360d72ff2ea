"""The cache folder: variable ``LIT_COMPRESS_CACHE``, else ``~/.cache/lit_compress``; all in it can be made again.

Every entry is a folder with a ``manifest.json`` (utils/manifest.py). An entry that differs from it, e.g. after a full
disk or a crash of the machine, is made again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder
from lit_compress.utils.manifest import MANIFEST, difference, write_manifest
from lit_compress.utils.progress import note


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet."""
    return Path(os.environ.get("LIT_COMPRESS_CACHE") or "~/.cache/lit_compress").expanduser()


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it does not exist or is broken, let ``fill`` write a temporary folder and rename that.

    A killed process leaves no half-written folder; a second process waits for the first one's folder.

    Raises:
        UserError: the cache cannot be written.
    """

    def whole() -> bool:
        return (folder / MANIFEST).is_file() and difference(folder) is None

    if whole():
        return folder
    locks = folder.parent / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        held = FileLock(locks / folder.name).acquire()
    except OSError as error:
        raise UserError(
            f"LIT_COMPRESS_CACHE: cannot write to '{folder.parent}' ({error.strerror}); give a folder you own"
        ) from error
    with held:
        if whole():
            return folder
        if (folder / MANIFEST).is_file():  # else an earlier version wrote it
            note(f"the cache entry '{folder}' is broken; it is made again")
        with atomic_folder(folder) as temporary:
            fill(temporary)
            write_manifest(temporary)
    return folder


def short_hash(*parts: object) -> str:
    """Return 16 hexadecimal digits, a hash of the ``repr`` of all parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
