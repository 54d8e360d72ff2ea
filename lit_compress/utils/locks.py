"""A lock file per piece of work, so that several workers, also of other machines, share a folder.

The lock is ``flock``'s: the system frees it when the process that has it dies, and the process it started with it.
Not every shared file system tells other machines of such locks, so that the file also names who has it. A name of
another machine is believed: nobody here can see whether that process lives.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lock:
    """A lock that was asked for.

    Attributes:
        file: the lock file.
        handle: its descriptor, to be passed on to a process that does the work; None if another worker has the lock.
        owner: ``host pid`` of that worker, as far as it is known.
    """

    file: Path
    handle: int | None
    owner: str = ""

    @property
    def taken(self) -> bool:
        """Whether the lock is this worker's."""
        return self.handle is not None


@contextmanager
def try_lock(file: Path) -> Iterator[Lock]:
    """Take the lock of ``file`` if nobody has it; free it when the context ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o664)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Lock(file, None, _read(handle))
            return
        owner = _read(handle)
        if owner and owner.partition(" ")[0] != host():
            yield Lock(file, None, owner)
            return
        _write(handle, f"{host()} {os.getpid()}")
        try:
            yield Lock(file, handle)
        finally:
            _write(handle, "")  # the file stays: another worker may be waiting with it open
    finally:
        os.close(handle)


def owner_of(file: Path) -> str | None:
    """Return ``host pid`` of the worker that has the lock of ``file``; None if nobody has it."""
    if not file.is_file():
        return None
    with try_lock(file) as lock:
        return None if lock.taken else lock.owner or "another worker"


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _read(handle: int) -> str:
    return os.pread(handle, 200, 0).decode(errors="replace").strip()


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
    os.fsync(handle)
