"""Memory of the process, and free memory of the machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
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
    """Let the memory of a freed tensor go back to the system at once, inside; afterwards glibc keeps up to 32 MiB.

    For matrices of many sizes before a training, in which a call to the system for every tensor would cost time.
    """
    return_freed_memory()
    try:
        yield
    finally:
        _mallopt(_MMAP_THRESHOLD, _MOST)
        _mallopt(_TRIM_THRESHOLD, 2 * _MOST)


def _mallopt(option: str, value: int) -> None:
    if option not in os.environ:
        _glibc("mallopt", _OPTIONS[option], value)


def trim() -> None:
    """Return freed memory to the system, once, between two large phases; without glibc nothing happens."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *values: int) -> None:
    if sys.platform.startswith("linux") and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*values)


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new work of this process can have; None if the system does not say.

    These are the machine's available memory and free swap, or less if a limit of a container (a cgroup of version 2),
    or of one around it, is nearer. Files that can be dropped do not count as used. ``root`` has ``proc`` and ``sys``.
    """
    rows = map(str.split, _text(root / "proc/meminfo").splitlines())
    sizes = {row[0]: 1024 * int(row[1]) for row in rows if row[2:] == ["kB"]}
    if "MemAvailable:" not in sizes:
        return None
    left, top = [sizes["MemAvailable:"] + sizes.get("SwapFree:", 0)], root / "sys/fs/cgroup"
    groups = [line.split("::/", 1)[1] for line in _text(root / "proc/self/cgroup").splitlines() if "::/" in line]
    for folder in (place for group in groups for place in (top / group, *(top / group).parents)):
        limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit() and used.isdigit():
            held = dict(map(str.split, _text(folder / "memory.stat").splitlines()))
            left.append(max(0, int(limit) - int(used) + int(held.get("inactive_file", 0))))
    return min(left)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
