"""Tables for the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def screen_table(header: Sequence[str], body: Iterable[Sequence[str]], left: int = 1, whole: int = 0) -> Table:
    """Return a table for the terminal.

    Args:
        header: names of the columns.
        body: rows of cells.
        left: number of the first columns that are aligned to the left, not to the right.
        whole: number of the first columns whose cells are never broken into lines.
    """
    from rich.table import Table

    table = Table()
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i < whole)
    for row in body:
        table.add_row(*row)
    return table


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])
