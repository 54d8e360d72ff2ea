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


class Bar:
    """A progress bar for work whose steps take unequal time; it shows the time that is left."""

    def __init__(self, description: str, total: float) -> None:
        self._bar = tqdm(
            total=total, desc=description, leave=False, disable=not _first() or None, dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left",
        )  # fmt: skip

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, description: str) -> None:
        """Show what is being done."""
        self._bar.set_description(description)

    def advance(self, amount: float) -> None:
        """Move on by a part of the total."""
        self._bar.update(amount)


def note(line: str) -> None:
    """Print a line that a user should know but need not act on, once per process, on the first rank only."""
    if _first() and line not in _noted:
        print(f"note: {line}", file=sys.stderr)
    _noted.add(line)


def _first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"
