"""Lists that a table holds as text, as JSON, Python, pandas, datasets, numpy, Spark and PostgreSQL write them."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from lit_compress.utils.errors import UserError

_ENDS = {"[": "]", "(": ")", "{": "}"}
_CALL = re.compile(r"(?:\w+\.)?(?:array|tensor|list|tuple|set)\((.*?)(?:,\s*dtype=[^()]*)?\)", re.DOTALL)
_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,'"\[\](){}]+"""
_ITEM = re.compile(rf"\s*(?:np\.\w+\((?P<scalar>{_VALUE})\)|(?P<value>{_VALUE}))(?:\s*,|(?=[\s'\"])|$)\s*", re.DOTALL)


def list_in(where: str, text: str, bare: bool = False) -> list[Any] | None:
    """Return the list that a text holds; None for any other text.

    >>> list_in("", "['B-PER', 'O']") == list_in("", '["B-PER", "O"]') == list_in("", "['B-PER' 'O']")
    True
    >>> list_in("", "[toxic, insult]"), list_in("", "[toxic, insult]", bare=True)
    (None, ['toxic', 'insult'])

    Args:
        where: the start of the message.
        text: of a cell.
        bare: items need no quotes; else a list without any is only read as JSON, if its items are texts.

    Raises:
        UserError: it begins and ends like a list of texts in quotes, and cannot be read.
    """
    body = text.strip()
    if call := _CALL.fullmatch(body):
        body = call[1].strip()
    if len(body) < 2 or _ENDS.get(body[0]) != body[-1]:
        return None
    inner = body[1:-1].strip()
    quoted = body[1] in "'\"" or inner.startswith("np.")
    if body[0] == "[":
        try:
            items = json.loads(body)
            return items if bare or all(isinstance(item, str) for item in items) else None
        except (ValueError, RecursionError):
            pass
    if (quoted or bare) and (items := _items(inner)) is not None:
        return items
    if quoted and inner[-1:] in ("'", '"', ")"):
        raise UserError(
            f'{where} is {text!r:.60}, a list that cannot be read; write it as JSON, e.g. ["a", "b"], or give a '
            ".jsonl or .parquet file"
        )
    if bare and body[0] != "(" and not re.search(r"['\"\[\](){}]", inner):
        return [part.strip() for part in inner.split(",")]
    return None


def _items(inner: str) -> list[Any] | None:
    """Return the values between the brackets, with or without commas; None if one is no literal."""
    place, items = 0, []
    while place < len(inner):
        if (item := _ITEM.match(inner, place)) is None:
            return None
        try:
            value = ast.literal_eval(item["scalar"] or item["value"])
        except (ValueError, SyntaxError):
            return None
        if value is ...:  # a long array, shortened
            return None
        items.append(value)
        place = item.end()
    return items
