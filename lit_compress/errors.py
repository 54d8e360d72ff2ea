"""What a user did wrong, said in one line: the name, the value, the nearest valid value.

The command line prints a :class:`UserError` as that one line and exits with code 2; anything else
that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error the user can mend; its message is one complete line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def nearest(value: object, valid: Iterable[object], limit: int = 8) -> str:
    """Return the end of an error message: the closest of the ``valid`` values, or a short list of them.

    >>> nearest("sst3", ["cola", "sst2"])
    "did you mean 'sst2'?"
    """
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    shown = ", ".join(names[:limit])
    return f"valid: {shown}{', ...' if len(names) > limit else ''}"
