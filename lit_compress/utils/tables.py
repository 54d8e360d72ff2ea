"""Lines and tables for the screen and in Markdown, of texts that may be anybody's."""

from __future__ import annotations

import builtins
import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

from lit_compress.utils.errors import printable

_SIGNS = re.compile(r"([\\`*{}\[\]<>|#]|(?<!\w)_|_(?!\w))")


def print(*values: object, sep: str = " ", file: TextIO | None = None, flush: bool = False) -> None:
    """Print lines; characters that a terminal would obey are spelled out."""
    builtins.print(*(printable(str(value)) for value in values), sep=sep, file=file, flush=flush)


def show(header: Sequence[str], body: Iterable[Iterable[str]], left: int = 1, whole: int = 0) -> None:
    """Print a table, in a terminal as wide as that, in a file with 160 columns.

    Args:
        header: names of the columns.
        body: rows of cells.
        left: number of the first columns that are aligned to the left, not to the right.
        whole: number of the first columns whose cells are never broken into lines.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for i, name in enumerate(header):
        side: Literal["left", "right"] = "left" if i < left else "right"
        table.add_column(escape(printable(name)), justify=side, no_wrap=i < whole, overflow="fold")
    for row in body:
        table.add_row(*(escape(printable(cell)) for cell in row))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=160)).print(table)


def escaped(text: object) -> str:
    r"""Return a text as one line of Markdown that shows it.

    >>> print(escaped("a_b *c* <b>"))
    a_b \*c\* \<b\>
    """
    line = printable(" ".join(str(text).split()))
    return _SIGNS.sub(r"\\\1", line)


def as_code(text: object) -> str:
    """Return a text as it can stand between backticks."""
    return printable(" ".join(str(text).split())).replace("`", "'")
