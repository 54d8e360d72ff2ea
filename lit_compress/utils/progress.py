"""Progress outside training, and notes to the user, on the first rank only: bars in a terminal, lines in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

from lit_compress.utils.errors import as_shown, printable

T = TypeVar("T")
LONG = 5.0  # seconds; a phase that takes less prints no lines
PAUSE = 60.0  # seconds between two lines of a phase, at least
_noted: set[str] = set()


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return ``items``; a terminal shows a bar called ``description`` until they are done, a file gets lines."""
    if _terminal():
        said = printable(description)
        return tqdm(items, desc=said, total=total, leave=False, disable=not _first(), dynamic_ncols=True)
    return _with_lines(items, description, total)


def _with_lines(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    with Lines(description, total) as lines:
        for number, item in enumerate(items, 1):
            try:
                yield item
            except GeneratorExit:
                if number != total:
                    raise
                return  # the caller does not ask whether there are more
            lines.advance(1)


class Lines:
    """Lines for a phase whose output is no terminal: how much is done and left, every :data:`PAUSE`, and its end.

    A phase shorter than :data:`LONG` prints nothing. The time that is left follows from the time that has gone. Nothing
    is printed in a terminal.

    Args:
        description: of the phase.
        total: amount of work; None if it is not known.
    """

    def __init__(self, description: str, total: float | None = None) -> None:
        self.description, self.total, self._done = description, total, 0.0
        self._off = _terminal() or not _first()
        self._next = LONG  # seconds after the start, at which the next line is due
        self._start = time.perf_counter()

    def __enter__(self) -> Lines:
        self._start = time.perf_counter()
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        if self._next > LONG:
            self._print(f"{'stopped' if error else 'ended'} after {spoken(time.perf_counter() - self._start)}")
        self._off, self._next = True, LONG

    def advance(self, amount: float) -> None:
        """Count work that is done, and print a line if one is due."""
        self._done += amount
        gone = time.perf_counter() - self._start
        if self._off or gone < self._next:
            return
        self._next = gone + PAUSE
        if not self.total:
            self._print(f"{self._done:g} done")
        elif self._done < self.total:
            left = gone * (self.total / self._done - 1)
            self._next = gone + max(PAUSE, (gone + left) / 10)
            self._print(f"{self._done / self.total:.0%} done, about {spoken(left)} left")

    def _print(self, line: str) -> None:
        print(printable(f"{self.description}: {line}"), file=sys.stderr, flush=True)


def spoken(seconds: float) -> str:
    """Return a time as people say it.

    >>> spoken(42), spoken(250), spoken(8000)
    ('42 s', '4 min', '2 h 13 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def note(line: str) -> None:
    """Print a line that a user should know but need not act on, once per process, on the first rank only."""
    line = as_shown(line)
    if _first() and line not in _noted:
        print(f"note: {line}", file=sys.stderr)
    _noted.add(line)


def _first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0"


def _terminal() -> bool:
    return sys.stderr.isatty()
