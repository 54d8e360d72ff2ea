"""Progress outside training, and notes to the user, on the first rank only: bars in a terminal, lines in a file."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

from lit_compress.utils.errors import as_shown, printable

T = TypeVar("T")
LONG = 5.0  # seconds; a phase that takes less prints no lines
PAUSE = 60.0  # seconds between two lines of a phase, at least
SHORT = 1.0  # seconds; work of less says little about the rest: on an accelerator its first step is the slowest by far
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
    """Lines for a phase whose output is no terminal: when it begins, with its expected time, how much is left, its end.

    A line with the time left comes after every tenth of the phase, but not more often than every :data:`PAUSE`. The
    time follows from the first part of the work; if that takes less than :data:`SHORT`, from the parts after it. A
    phase shorter than :data:`LONG` prints nothing. If its first part takes longer, the first line comes before it is
    done and has no time. Nothing is printed in a terminal.

    Args:
        description: of the phase.
        total: amount of work; None if it is not known.
    """

    def __init__(self, description: str, total: float | None = None) -> None:
        self.description, self.total, self._done, self._began = description, total, 0.0, False
        self._off = _terminal() or not _first()
        self._first_part = (0.0, 0.0)  # seconds and amount of the first part
        self._next = 0.0  # seconds after the start, at which the next line is due
        self._start = time.perf_counter()
        self._lock, self._timer = threading.Lock(), threading.Timer(LONG, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Lines:
        self._start = time.perf_counter()
        if not self._off:
            self._timer.start()
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            began, self._off = self._began, True
        if began:
            self._print(f"{'stopped' if error else 'ended'} after {spoken(time.perf_counter() - self._start)}")

    def advance(self, amount: float) -> None:
        """Count work that is done; print the first line if the whole will take long, later the time that is left."""
        self._done += amount
        if self._off or not self._done:
            return
        gone = time.perf_counter() - self._start
        seconds, first = self._first_part = self._first_part if self._first_part[1] else (gone, self._done)
        if gone < SHORT:
            return
        whole = gone
        if self.total and self._done > first:
            whole = seconds + (gone - seconds) * (self.total - first) / (self._done - first)
        elif self.total:
            whole = gone * self.total / self._done
        if not self._began and max(gone, whole) >= LONG:
            self._next = gone + max(PAUSE, whole / 10)
            self._begin(f", about {spoken(whole)}" if self.total else "")
        elif self._began and self.total and self._next <= gone and self._done < self.total:
            self._next = gone + max(PAUSE, whole / 10)
            self._print(f"{self._done / self.total:.0%} done, about {spoken(whole - gone)} left")

    def _begin(self, expected: str = "") -> None:
        with self._lock:
            if self._began or self._off:
                return
            self._began = True
        self._timer.cancel()
        self._print(f"begins{expected}")

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
