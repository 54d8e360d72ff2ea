"""File formats and tables -> rows as they are written, a part of the file at a time; what is broken is one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_compress.errors import UserError, nearest
from lit_compress.kinds import kind_of
from lit_compress.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 10_000  # rows that are Python objects at one time
LONGEST_FIELD = 2**24  # characters of a CSV field; a quote that is not closed must not swallow a huge file
csv.field_size_limit(LONGEST_FIELD)

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What a file or table holds.

    Attributes:
        names: of its columns; None if every row names its own (JSON lines).
        rows: once, in order.
        classes: names of the labels, if the table brings them (``ClassLabel`` of the library datasets).
    """

    names: list[str] | None
    rows: Iterator[Row]
    classes: list[str] | None = None


def need_columns(task: Task, where: str, names: Iterable[str]) -> None:
    """Check that the text columns of ``task`` are among ``names``.

    Raises:
        UserError: one is not; names the nearest.
    """
    names = list(names)
    for column in task.text:
        if column not in names:
            raise UserError(f"{where} has no column '{column}'; {nearest(column, names)}")


def check_types(task: Task, where: str, schema: pa.Schema) -> None:
    """Check that a table's text columns are text, or lists of words where the task has words.

    Raises:
        UserError: one is not.
    """
    import pyarrow as pa

    need_columns(task, where, schema.names)
    for name in task.text:
        kind = item = schema.field(name).type
        if kind_of(task).words and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            item = kind.value_type
        if pa.types.is_dictionary(item):  # a pandas categorical
            item = item.value_type
        if not (pa.types.is_string(item) or pa.types.is_large_string(item)):
            wanted = "text or lists of words" if kind_of(task).words else "text (string)"
            raise UserError(f"{where} column '{name}' is of type {kind}; give {wanted}")


def class_names(task: Task, schema: pa.Schema) -> list[str] | None:
    """Return the names that stand in a table's metadata for the numbers in the label column, if there are any."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    feature = json.loads(metadata).get("info", {}).get("features", {}).get(task.label) if metadata else None
    if isinstance(feature, list):
        feature = feature[0]
    if isinstance(feature, dict) and "feature" in feature:  # of a list
        feature = feature["feature"]
    return feature.get("names") if isinstance(feature, dict) else None


def named(task: Task, rows: Iterator[Row], names: list[str] | None) -> Iterator[Row]:
    """Yield the rows with names for class numbers, if these are the classes of ``task``."""
    if names is None or set(names) != set(task.labels):
        return rows

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(item) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return ({**row, task.label: name(row[task.label])} if task.label in row else row for row in rows)


def from_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Yield the rows of Arrow batches, of which few should be alive at a time."""
    for batch in batches:
        batch.validate(full=True)  # bytes that are not UTF-8
        yield from batch.to_pylist()


def from_table(task: Task, where: str, table: pa.Table) -> Rows:
    """Return the rows of an Arrow table; ``where`` begins the error messages."""
    check_types(task, where, table.schema)
    names = class_names(task, table.schema)
    return Rows(table.column_names, named(task, from_batches(table.to_batches(CHUNK)), names), names)


def _read_parquet(task: Task, where: str, file: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.stat().st_size == 0:
        raise UserError(f"{where} is empty (0 bytes)")

    def readable(error: Exception) -> UserError:
        return UserError(f"{where} is no readable parquet file: {str(error)[:160]}")

    try:
        source = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise readable(error) from error
    names = source.schema_arrow.names
    check_types(task, where, source.schema_arrow)
    columns = [n for n in dict.fromkeys((*task.text, task.label, *kind_of(task).extras)) if n in names]

    def rows() -> Iterator[Row]:
        try:
            yield from from_batches(source.iter_batches(CHUNK, columns=columns))
        except (pa.ArrowException, OSError) as error:
            raise readable(error) from error

    classes = class_names(task, source.schema_arrow)
    return Rows(names, named(task, rows(), classes), classes)


def _read_jsonl(task: Task, where: str, file: Path) -> Rows:
    def rows() -> Iterator[Row]:
        row = 0
        for line in _lines(where, file):
            if not line.strip():
                continue
            row += 1
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} row {row}: malformed JSON: {error.msg} (column {error.colno})") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
                raise UserError(f"{where} row {row}: malformed JSON: {error}") from error
            if not isinstance(value, dict):
                raise UserError(f"{where} row {row}: a JSON {type(value).__name__}; give one object per line")
            yield value

    return Rows(None, rows())


def _read_separated(delimiter: str, quoting: Literal[0, 3]) -> Callable[[Task, str, Path], Rows]:
    def read(task: Task, where: str, file: Path) -> Rows:
        reader = csv.reader(_lines(where, file), delimiter=delimiter, quoting=quoting, strict=True)

        def rows() -> Iterator[Row]:
            row = 0
            try:
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

        try:
            header = next(reader, [])
        except csv.Error as error:
            raise UserError(f"{where} header: {error}") from error
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError(f"{where} has the column '{twice[0]}' twice; rename one")
        return Rows(header, rows())

    return read


def _lines(where: str, file: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, a byte order mark left out; errors name the byte."""
    offset = 0
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
            if b"\0" in line:
                at = offset + line.index(b"\0")
                raise UserError(f"{where} line {number}: byte {at} is NUL; save the file as plain UTF-8 text")
            offset += len(line)
            yield text.removeprefix("\ufeff") if number == 1 else text


def _read_text(task: Task, where: str, file: Path) -> Rows:
    """Return the lines, with their ends, as the first text column."""
    return Rows([task.text[0]], ({task.text[0]: line} for line in _lines(where, file)))


READERS: dict[str, Callable[[Task, str, Path], Rows]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": _read_separated(",", csv.QUOTE_MINIMAL),
    ".tsv": _read_separated("\t", csv.QUOTE_NONE),
    ".txt": _read_text,
}
