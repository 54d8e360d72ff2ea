"""Errors that a user can cause, each one line: the name, the value, the nearest valid value.

The command line prints a :class:`UserError` as that one line and exits with code 2; any other exception
is a bug of the package and keeps its traceback.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

LONGEST = 600  # characters of a line
SHOWN_AS: dict[str, str] = {}  # folder of the hub's cache -> the name by which the user knows it


# what a terminal obeys or shows in another order: control characters besides tab and line end, marks of direction and
# of lines, and halves of characters, which cannot be written
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return ``text``, which may be anybody's, without characters that a terminal would obey: they are spelled out.

    >>> printable("a\x1b[31m b"), printable("\u202eabc")
    ('a\\u001b[31m b', '\\u202eabc')
    """
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_shown(text: str) -> str:
    """Return ``text`` as a user may see it, with names on the hub in place of the folders of the cache."""
    for folder, name in SHOWN_AS.items():
        text = text.replace(folder, name)
    return printable(text)


class UserError(Exception):
    """An error that the user can correct; its message is one complete line, without the middle of a very long value."""

    def __init__(self, message: str) -> None:
        line = as_shown(" ".join(message.split()))
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 205]} ... {line[-200:]}")


def user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError that caused ``error``, which parsers and trainers wrap in their own; None without one."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def require(
    settings: object,
    option: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> None:
    """Refuse a setting that is out of its range; None is in every range.

    Args:
        settings: the object with the setting.
        option: name of the setting as users type it, e.g. ``prune.beta``; the attribute is its last part.
        low, high: smallest and largest valid value.
        above, below: bounds that are not valid themselves.
        hint: end of the message, in place of the nearest valid value.

    >>> from types import SimpleNamespace
    >>> require(SimpleNamespace(beta=1.0), "prune.beta", low=0, below=1)
    Traceback (most recent call last):
    lit_compress.utils.errors.UserError: prune.beta: 1.0 is not in [0, 1); nearest valid 0.99
    """
    value = getattr(settings, option.rpartition(".")[2])
    if value is None:
        return
    if not math.isfinite(value):
        bound = next((f"nearest valid {bound}" for bound in (low, high) if bound is not None), "give one")
        raise UserError(f"{option}: {value} is not a finite number; {hint or bound}")
    lower, upper = above if low is None else low, below if high is None else high
    assert lower is not None
    over, under = value > lower or value == low, upper is None or value < upper or value == high
    if over and under:
        return
    if upper is None:
        said = f"not above {above}; {hint}" if low is None else f"below {low}, the smallest valid value"
        raise UserError(f"{option}: {value} is {said}")
    interval = f"{'(' if low is None else '['}{lower}, {upper}{')' if high is None else ']'}"
    number = type(value) if isinstance(value, float) else type(lower)
    bounds = number(lower) if low is not None else lower + 0.01, number(upper) if high is not None else upper - 0.01
    raise UserError(f"{option}: {value} is not in {interval}; {hint or f'nearest valid {bounds[over]}'}")


def nearest(value: object, valid: Iterable[object], limit: int = 8) -> str:
    """Return the end of an error message: the ``valid`` value most similar to ``value``, or a short list of them.

    >>> nearest("sst3", ["cola", "sst2"])
    "did you mean 'sst2'?"
    >>> nearest("Lpaf", ["SVD", "LPAF"])
    "did you mean 'LPAF'?"
    """
    names = [str(v) for v in valid]
    lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(str(value).lower(), lower, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{lower[close[0]]}'?"
    shown = ", ".join(names[:limit])
    return f"valid: {shown}{', ...' if len(names) > limit else ''}"
