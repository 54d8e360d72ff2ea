"""File formats and tables -> text columns and labels as they are written; what is broken is one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.errors import UserError, nearest
from lit_compress.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

LABEL = "label"
CHUNK = 10_000  # rows that are Python objects at one time

# The text columns as an Arrow table; the labels as they are written, None if there is no such column; the
# names of all columns.
Raw = tuple["pa.Table", list[Any] | None, list[str]]


def need_columns(task: Task, where: str, names: Iterable[str]) -> None:
    """Check that the text columns of ``task`` are among ``names``.

    Raises:
        UserError: one is not; names the nearest.
    """
    names = list(names)
    for column in task.text:
        if column not in names:
            raise UserError(f"{where} has no column '{column}'; {nearest(column, names)}")


def from_table(task: Task, where: str, table: pa.Table) -> Raw:
    """Check an Arrow table's text columns; ``where`` begins the error messages."""
    import pyarrow as pa
    import pyarrow.compute as pc

    need_columns(task, where, table.column_names)
    columns = {}
    for name in task.text:
        column = table[name]
        if pa.types.is_dictionary(column.type):  # a pandas categorical
            column = column.cast(column.type.value_type)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise UserError(f"{where} column '{name}' is of type {column.type}; give text (string)")
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py() + 1
            raise UserError(f"{where} row {row}: '{name}' is null; fill it in or leave the row out")
        columns[name] = column
    labels = table[LABEL].to_pylist() if LABEL in table.column_names else None
    return pa.table(columns), labels, table.column_names


def from_rows(task: Task, where: str, rows: Iterable[dict[str, Any]]) -> Raw:
    """Check rows one by one and gather them in Arrow tables; ``where`` begins the error messages."""
    import pyarrow as pa

    tables: list[pa.Table]
    chunk: list[dict[str, Any]]
    labels: list[Any]
    names: dict[str, None]  # an ordered set
    schema = pa.schema([(name, pa.string()) for name in task.text])
    tables, chunk, labels, names = [schema.empty_table()], [], [], {}
    for number, row in enumerate(rows, start=1):
        for name in task.text:
            if name not in row:
                raise UserError(f"{where} row {number} has no '{name}'; {nearest(name, row)}")
            if row[name] is None:
                raise UserError(f"{where} row {number}: '{name}' is null; fill it in or leave the row out")
            if not isinstance(row[name], str):
                raise UserError(
                    f"{where} row {number}: '{name}' is {row[name]!r:.60} ({type(row[name]).__name__}); give text"
                )
        names.update(dict.fromkeys(row))
        labels.append(row.get(LABEL))
        chunk.append({name: row[name] for name in task.text})
        if len(chunk) == CHUNK:
            tables.append(pa.Table.from_pylist(chunk, schema=schema))
            chunk = []
    tables.append(pa.Table.from_pylist(chunk, schema=schema))
    return pa.concat_tables(tables), labels if LABEL in names else None, list(names)


def _read_parquet(task: Task, file: Path) -> Raw:
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = f"data.path: '{file}'"
    if file.stat().st_size == 0:
        raise UserError(f"{where} is empty (0 bytes)")
    try:
        names = pq.read_schema(file).names
        columns = [name for name in (*task.text, LABEL) if name in names]
        need_columns(task, where, names)
        table = pq.read_table(file, columns=columns)
        table.validate(full=True)  # bytes that are not UTF-8
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{where} is no readable parquet file: {str(error)[:160]}") from error
    return *from_table(task, where, table)[:2], names


def _read_jsonl(task: Task, file: Path) -> Raw:
    where = f"data.path: '{file}'"

    def rows() -> Iterator[dict[str, Any]]:
        row = 0
        for line in _lines(file):
            if not line.strip():
                continue
            row += 1
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} row {row}: malformed JSON: {error.msg} (column {error.colno})") from error
            if not isinstance(value, dict):
                raise UserError(f"{where} row {row}: a JSON {type(value).__name__}; give one object per line")
            yield value

    return from_rows(task, where, rows())


def _read_separated(delimiter: str, quoting: Literal[0, 3]) -> Callable[[Task, Path], Raw]:
    def read(task: Task, file: Path) -> Raw:
        where = f"data.path: '{file}'"

        def rows() -> Iterator[dict[str, Any]]:
            row = 0
            reader = csv.reader(_lines(file), delimiter=delimiter, quoting=quoting, strict=True)
            try:
                header = next(reader, [])
                need_columns(task, where, header)
                for fields in reader:
                    if not fields:
                        continue  # an empty line, as at the end of many files
                    row += 1
                    if len(fields) != len(header):
                        raise UserError(
                            f"{where} row {row}: {len(fields)} fields, the header has {len(header)}: "
                            f"{', '.join(header)}"
                        )
                    # there is no null in these formats: an empty field is a missing value
                    yield {name: field or None for name, field in zip(header, fields, strict=True)}
            except csv.Error as error:
                raise UserError(f"{where} row {row + 1}: {error}") from error

        return from_rows(task, where, rows())

    return read


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, a byte order mark left out; errors name the byte."""
    where, offset = f"data.path: '{file}'", 0
    if file.stat().st_size == 0:
        raise UserError(f"{where} is empty (0 bytes)")
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} line {number}: byte {offset + error.start} (0x{line[error.start]:02x}) is not UTF-8; "
                    "save the file as UTF-8"
                ) from error
            offset += len(line)
            yield text.removeprefix("\ufeff") if number == 1 else text


READERS: dict[str, Callable[[Task, Path], Raw]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": _read_separated(",", csv.QUOTE_MINIMAL),
    ".tsv": _read_separated("\t", csv.QUOTE_NONE),
}
