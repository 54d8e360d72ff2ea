"""Memory of the process."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD, _BYTES = -3, 1 << 20  # number of the option in glibc's mallopt; a tensor of this size or more


def return_freed_memory() -> None:
    """Let the memory of a freed tensor go back to the system at once, from now on; without glibc nothing changes.

    glibc takes large tensors from its heap once one as large was freed (up to 32 MiB), and keeps what is freed between
    others. A process that makes and frees matrices of many sizes so grows: `factorize --by_block` did with every block.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_MMAP_THRESHOLD, _BYTES)


def trim() -> None:
    """Give what was freed so far back to the system, once; without glibc nothing happens.

    Between two large phases: what lies free between small things that live on is not used by the next phase, either.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
