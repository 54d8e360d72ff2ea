"""Lists that a table holds as text, as JSON and Python write them."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from lit_compress.utils.errors import UserError

_ENDS = {"[": "]", "(": ")", "{": "}"}


def list_in(where: str, text: str, bare: bool = False) -> list[Any] | None:
    """Return the list that a text holds, whose items may be numbers if it is ``bare``; None for any other text.

    >>> list_in("", "['B-PER', 'O']") == list_in("", '["B-PER", "O"]') == ["B-PER", "O"]
    True
    >>> list_in("", "[0, 1]"), list_in("", "[0, 1]", bare=True)
    (None, [0, 1])

    Raises:
        UserError: it begins and ends like such a list, and cannot be read; the message begins with ``where``.
    """
    body, items = text.strip(), None
    if len(body) < 2 or _ENDS.get(body[0]) != body[-1]:
        return None
    joined = re.search(r"['\"]\s+['\"]", body)  # of numpy, without commas: Python would join the texts
    for read in (json.loads,) if joined else (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            items = read(body)
            break
    if isinstance(items, list | tuple) and (bare or all(isinstance(item, str) for item in items)):
        return list(items)
    quoted = body[1] in "'\"" and body[-2] in "'\""
    if quoted or (bare and body[0] != "(" and not re.search(r"[\[\](){}]", body[1:-1])):
        raise UserError(
            f'{where} is {text!r:.60}, a list that cannot be read; write it as JSON, e.g. ["a", "b"], or give a '
            ".jsonl or .parquet file"
        )
    return None
