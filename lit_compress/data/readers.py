"""Readers of file formats and tables, which yield rows one chunk at a time; an error is one line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_compress.data.json_rows import Row, json_rows
from lit_compress.data.lines import check_unpacked, most_unpacked, text_lines
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError, nearest
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 10_000  # rows that are Python objects at one time
LONGEST_FIELD = 2**24  # characters of a CSV field; a quote that is not closed must not swallow a huge file
csv.field_size_limit(LONGEST_FIELD)


@dataclass(frozen=True)
class Rows:
    """The content of a file or table.

    Attributes:
        names: names of the columns; None if every row has its own (JSON lines).
        rows: iterator over the rows, in order.
        classes: names of the labels, if the table has them (``ClassLabel`` of the library datasets).
    """

    names: list[str] | None
    rows: Iterator[Row]
    classes: list[str] | None = None


Reader = Callable[[Task, str, Path, str], Rows]  # of a task, a file as errors call it, and its encoding


def need_columns(task: Task, where: str, names: Iterable[str]) -> None:
    """Check that the text columns of ``task`` are among ``names``.

    Raises:
        UserError: a column is missing; the message names the nearest.
    """
    names = list(names)
    for column in task.text:
        if column not in names:
            raise UserError(f"{where} has no column '{column}'; {nearest(column, names)}")


def check_types(task: Task, where: str, schema: pa.Schema) -> None:
    """Check that a table's text columns are text, or lists of words where the task has words.

    Raises:
        UserError: a column is missing or has another type.
    """
    import pyarrow as pa

    _check_header(where, schema.names)
    need_columns(task, where, schema.names)
    for name in task.text:
        kind = item = schema.field(name).type
        if task_type(task).words and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            item = kind.value_type
        if pa.types.is_dictionary(item):  # a pandas categorical
            item = item.value_type
        if not any(
            is_text(item) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        ):
            wanted = "text or lists of words" if task_type(task).words else "text (string)"
            raise UserError(f"{where} column '{name}' is of type {kind}; give {wanted}")


def class_names(task: Task, schema: pa.Schema) -> list[str] | None:
    """Return the class names in a table's metadata, in order of the numbers in the label column; None without any."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(metadata)["info"]["features"].get(task.label) if metadata else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not written by the library
    if isinstance(feature, list):
        feature = feature[0]
    if isinstance(feature, dict) and "feature" in feature:  # of a list
        feature = feature["feature"]
    return feature.get("names") if isinstance(feature, dict) else None


def named(task: Task, rows: Iterator[Row], names: list[str] | None) -> Iterator[Row]:
    """Return the rows with class numbers replaced by ``names``, if these are the labels of ``task``."""
    if names is None or set(names) != set(task.labels):
        return rows

    def name(value: object) -> object:
        if isinstance(value, list):
            return [name(item) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else value

    return ({**row, task.label: name(row[task.label])} if task.label in row else row for row in rows)


def from_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Yield the rows of Arrow batches, one batch at a time."""
    for batch in batches:
        batch.validate(full=True)  # bytes that are not UTF-8
        yield from batch.to_pylist()


def from_table(task: Task, where: str, table: pa.Table) -> Rows:
    """Return the rows of an Arrow table; error messages begin with ``where``."""
    check_types(task, where, table.schema)
    names = class_names(task, table.schema)
    return Rows(table.column_names, named(task, from_batches(table.to_batches(CHUNK)), names), names)


def _text_bytes(values: pa.Array) -> int:
    """Return how many bytes the values of a column have as objects, texts that are stored once each time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type):
        return sum(map(_text_bytes, values.flatten()))
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _text_bytes(values.flatten())
    if pa.types.is_dictionary(values.type):
        return pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0
    return values.nbytes


def _read_parquet(task: Task, where: str, file: Path, encoding: str) -> Rows:
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
    wanted = (*task.text, *task.label_columns, task.label, "id", "idx", *task_type(task).extras)
    columns = [name for name in dict.fromkeys(wanted) if name in names]
    parts = [source.schema.column(number) for number in range(len(source.schema))]
    once = [part.path for part in parts if part.physical_type == "BYTE_ARRAY" and part.path.split(".")[0] in columns]
    most = most_unpacked(file)

    def rows() -> Iterator[Row]:
        total = 0
        try:
            for group in map(source.metadata.row_group, range(source.num_row_groups)):
                sizes = [group.column(number).total_uncompressed_size for number in range(len(parts))]
                check_unpacked(where, max(sizes, default=0), most)
            # texts that are stored once are not repeated before their size is known
            for batch in pq.ParquetFile(file, read_dictionary=once).iter_batches(CHUNK, columns=columns):
                total += sum(map(_text_bytes, batch.columns))
                check_unpacked(where, total, most)
                yield from from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise readable(error) from error

    classes = class_names(task, source.schema_arrow)
    return Rows(names, named(task, rows(), classes), classes)


def _read_json(task: Task, where: str, file: Path, encoding: str) -> Rows:
    first = next(text_lines(where, file, encoding), "")
    if _looks_like(first, task) in _DELIMITERS:
        raise UserError(f"{where} is a table by its first line, not JSON; call it .csv or .tsv")
    return Rows(None, json_rows(task, where, text_lines(where, file, encoding, any_end=True)))


# how the fields of a table may be separated -> the suffix of such a file
_DELIMITERS = {",": ".csv", "\t": ".tsv", ";": ".csv", "|": ".csv"}
_JSON = "JSON"


def _looks_like(line: str, task: Task) -> str | None:
    """Return a file's format by its first line: ``JSON``, a header's delimiter if it has ``task``'s columns, None."""
    line = line.strip()
    if line in ("{", "["):
        return _JSON
    if line[:1] in ("{", "["):
        try:
            return _JSON if isinstance(json.loads(line), dict | list) else None
        except (ValueError, RecursionError):
            return _JSON if line.startswith(('{"', '[{"')) else None
    return next((sign for sign in _DELIMITERS if set(_fields(line, sign)) & {*task.text, task.label}), None)


def _fields(line: str, delimiter: str) -> list[str]:
    """Return the fields of a header, or none if it is no line of a table."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def _read_separated(usual: str) -> Reader:
    def read(task: Task, where: str, file: Path, encoding: str) -> Rows:
        lines = text_lines(where, file, encoding, any_end=True)
        first = next(lines, "")
        if _looks_like(first, task) == _JSON:
            raise UserError(f"{where} is JSON by its first line, not a table; call it .jsonl or .json")
        if excel := re.fullmatch(r'"?sep=(.)"?\s*', first):  # the first line for Excel alone
            first = next(lines, "")
        delimiter = _delimiter(task, where, first, excel[1] if excel else usual)
        plain = delimiter == "\t" == usual and not _has_quoted_fields(where, file, encoding)
        quoting: Literal[0, 3] = csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
        reader = csv.reader(chain([first], lines), delimiter=delimiter, quoting=quoting, strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise UserError(f"{where} header: {error}") from error
        _check_header(where, header)
        return Rows(header, _table_rows(where, header, reader))

    return read


def _delimiter(task: Task, where: str, first: str, usual: str) -> str:
    """Return the delimiter of the fields: the usual sign, or the one by which the first line has the task's columns."""
    for sign in (usual, *_DELIMITERS):
        if set(task.text) <= set(_fields(first.strip(), sign)):
            if sign != usual:
                note(f"{where}: fields are separated by {sign!r}")
            return sign
    return usual


def _check_header(where: str, header: list[str]) -> None:
    """Refuse repeated names.

    Raises:
        UserError: two columns have one name, or none.
    """
    if header.count("") > 1:
        raise UserError(f"{where} has {header.count('')} columns without a name; name or remove them")
    if twice := [name for name in header if header.count(name) > 1]:
        raise UserError(f"{where} has the column '{twice[0]}' twice; rename one")


def _table_rows(where: str, header: list[str], reader: Iterator[list[str]]) -> Iterator[Row]:
    """Yield the rows below a header."""
    row = 0
    try:
        for fields in reader:
            if not fields:
                continue  # an empty line, as at the end of many files
            row += 1
            if len(fields) != len(header):
                raise UserError(
                    f"{where} row {row}: {len(fields)} fields, the header has {len(header)}: {', '.join(header)}"
                )
            # there is no null in these formats: an empty field is a missing value
            yield {name: field or None for name, field in zip(header, fields, strict=True)}
    except csv.Error as error:
        raise UserError(f"{where} row {row + 1}: {error}") from error


def _has_quoted_fields(where: str, file: Path, encoding: str) -> bool:
    """Return whether a file with tabs can only be read with quotes: a field in quotes holds a tab or a line end.

    In most, GLUE's among them, quotes are ordinary characters, and rows have as many fields as the header so.
    """
    if not any(line.startswith('"') or '\t"' in line for line in text_lines(where, file, encoding)):
        return False
    for quoting in (csv.QUOTE_NONE, csv.QUOTE_MINIMAL):
        rows = csv.reader(text_lines(where, file, encoding, any_end=True), delimiter="\t", quoting=quoting, strict=True)
        try:
            header = next(rows, [])
            if all(len(fields) in (0, len(header)) for fields in rows):
                return quoting == csv.QUOTE_MINIMAL
        except csv.Error:
            continue
    return False


def _read_text(task: Task, where: str, file: Path, encoding: str) -> Rows:
    """Return the lines, with their ends, as the first text column."""
    if not task_type(task).one_text:
        _refuse_table(task, where, list(islice(text_lines(where, file, encoding), LINES_LOOKED_AT)))
    return Rows([task.text[0]], ({task.text[0]: line} for line in text_lines(where, file, encoding)))


LINES_LOOKED_AT = 20


def _refuse_table(task: Task, where: str, lines: list[str]) -> None:
    """Refuse a file that is called .txt and is no list of texts.

    Raises:
        UserError: its first line is JSON or a header, or all lines have as many fields as one.
    """
    first = next(iter(lines), "")
    sign_or_json = _looks_like(first, task)
    if sign_or_json == _JSON:
        raise UserError(f"{where} is JSON by its first line, not one text per line; call it .jsonl or .json")
    for sign, suffix in _DELIMITERS.items():
        header = _fields(first.strip(), sign)
        same = len(header) > 1 and all(len(_fields(line.rstrip("\r\n"), sign)) == len(header) for line in lines)
        names = all(re.fullmatch(r"[A-Za-z_][\w .-]{0,29}", name) for name in header)
        if sign == sign_or_json or (same and len(lines) > 2 and (names or sign == "\t")):
            raise UserError(f"{where} is a table by its first line, '{first.strip():.60}'; call it {suffix}")


READERS: dict[str, Reader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_separated(","),
    ".tsv": _read_separated("\t"),
    ".txt": _read_text,
}
SUFFIXES = f"{', '.join(READERS)} (text files also as .gz)"
READERS |= {f"{suffix}.gz": reader for suffix, reader in READERS.items() if suffix != ".parquet"}
_PACKED = (".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".tar", ".tgz")


def suffix_of(file: Path) -> str:
    """Return the end of a file's name by which ``READERS`` has its reader, or its suffix if none does."""
    both = "".join(file.suffixes[-2:]).lower()
    return both if both in READERS else file.suffix.lower()


def check_suffix(where: str, file: Path) -> None:
    """Refuse a file that has no reader.

    Raises:
        UserError: it is packed, or of another format.
    """
    suffix = suffix_of(file)
    if suffix in _PACKED:
        raise UserError(f"{where} is packed ({suffix}); unpack it, and give one of {SUFFIXES}")
    if suffix not in READERS:
        raise UserError(f"{where} is no {SUFFIXES}; {nearest(suffix, READERS)}")
