"""Progress bars for long work outside training, on the first rank only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return ``items`` with a bar called ``description``; it vanishes when done, and only a terminal shows it."""
    hidden = os.environ.get("LOCAL_RANK", "0") != "0" or os.environ.get("RANK", "0") != "0"
    return tqdm(items, desc=description, total=total, leave=False, disable=hidden or None, dynamic_ncols=True)
