"""Memory of the process, and free memory of the machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
_OPTIONS = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: -3}  # a user's variable -> number of the option in glibc's mallopt
_BYTES, _MOST = 1 << 20, 32 << 20  # a tensor of this size or more; the most that glibc keeps by itself


def peak_mib() -> float:
    """Return this process's peak resident size; not ru_maxrss, which starts at its parent's value."""
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    import resource  # where there is no /proc: in bytes on macOS

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def return_freed_memory() -> None:
    """Let the memory of a freed tensor go back to the system at once, from now on; without glibc nothing changes.

    A threshold that the user has set (``MALLOC_MMAP_THRESHOLD_``) stays. Otherwise glibc takes large tensors from its
    heap once one as large was freed (up to 32 MiB), and a process that frees matrices of many sizes grows.
    """
    _mallopt(_MMAP_THRESHOLD, _BYTES)


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Let the memory of a freed tensor go back to the system at once, inside; afterwards glibc keeps some again.

    For a phase with matrices of many sizes before a training, in which a call to the system for every tensor would cost
    time; there glibc keeps as much as after a tensor of 32 MiB was freed.
    """
    return_freed_memory()
    try:
        yield
    finally:
        _mallopt(_MMAP_THRESHOLD, _MOST)
        _mallopt(_TRIM_THRESHOLD, 2 * _MOST)


def _mallopt(option: str, value: int) -> None:
    """Set an option of glibc, unless the user has set it."""
    if option not in os.environ and (mallopt := _glibc("mallopt")):
        mallopt(_OPTIONS[option], value)


def trim() -> None:
    """Return freed memory to the system, once, between two large phases; without glibc nothing happens."""
    if malloc_trim := _glibc("malloc_trim"):
        malloc_trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new work of this process can have; None if the system does not say.

    These are the machine's available memory and free swap, or less if a limit of a container (a cgroup) is nearer.
    ``root`` has ``proc`` and ``sys``.
    """
    sizes = _kilobytes(root / "proc/meminfo")
    if "MemAvailable" not in sizes:
        return None
    return min([sizes["MemAvailable"] + sizes.get("SwapFree", 0), *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> list[int]:
    """Return the free memory under every limit above this process; files that can be dropped do not count as used."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers:  # of version 1
            continue
        top = root / "sys/fs/cgroup"
        folder = top / path.lstrip("/")
        for there in (folder, *folder.parents):
            limit, used = (_text(there / name).strip() for name in ("memory.max", "memory.current"))
            if limit.isdigit() and used.isdigit():
                files = next((int(w[1]) for w in map(str.split, _text(there / "memory.stat").splitlines())
                              if w[0] == "inactive_file"), 0)  # fmt: skip
                left.append(max(0, int(limit) - int(used) + files))
            if there == top:
                break
    return left


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the entries of a file with lines such as ``MemFree: 12 kB``, in bytes."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if row[2:] == ["kB"]}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
