"""Progress bars outside training, and notes to the user, on the first rank only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")
_noted: set[str] = set()


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return ``items`` with a progress bar called ``description``, shown in a terminal until it is done."""
    return tqdm(items, desc=description, total=total, leave=False, disable=not _first() or None, dynamic_ncols=True)


def note(line: str) -> None:
    """Print a line that a user should know but need not act on, once per process, on the first rank only."""
    if _first() and line not in _noted:
        print(f"note: {line}", file=sys.stderr)
    _noted.add(line)


def _first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"
