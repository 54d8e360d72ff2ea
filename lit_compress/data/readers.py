"""Files -> rows: pandas reads tables of text, the json module JSON, pyarrow parquet; an error is one line."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 10_000  # rows that are Python objects at one time
START = 2**16  # bytes that show an encoding
SEPARATORS = ";\t|,"

Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where rows are, and how they are read from there.

    Raises:
        UserError: there is no such encoding, the separator is no single character, or there are no files.
    """

    # a folder with ``train`` and ``validation`` (or ``dev``) and ``test`` files, as .parquet, .jsonl, .json, .csv, .tsv
    # or .txt (one text a line, without labels); a downloaded repository; a folder that ``save_to_disk`` of the library
    # datasets wrote; or a single file; None: the hub
    path: str | None = None
    encoding: str | None = None  # of text files; None: UTF-8
    separator: str | None = None  # between the fields of text files; None: the usual one, or the header's
    seed: int = 0  # decides the splits if all rows are in one table
    whole: bool = False  # every split is all rows of one table
    revision: str | None = None  # of the task's data set on the hub; None: the newest

    def __post_init__(self) -> None:
        try:
            "".encode(self.codec)
        except (LookupError, ValueError) as error:
            near = nearest(self.encoding, ("utf-8", "utf-16", "cp1252", "cp1251", "cp932", "gb18030", "latin-1"))
            raise UserError(f"data.encoding: '{self.encoding}' is no text encoding; {near}") from error
        if self.separator is not None and len(self.separator) != 1:
            raise UserError(f"data.separator: '{self.separator}' is not one character; give e.g. ';'")
        for option in ("encoding", "separator") if self.path is None else ():
            if (value := getattr(self, option)) is not None:
                raise UserError(f"data.{option}: {value} is for files; give --data.path, or leave it out")

    @property
    def codec(self) -> str:
        """The encoding; UTF-8 without a byte order mark."""
        encoding = self.encoding or "utf-8"
        return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding

    @property
    def folder(self) -> Path:
        """The path, which may be a file."""
        return Path(self.path or ".").expanduser()

    @property
    def where(self) -> str:
        """The start of error messages."""
        return f"data.path: '{self.path}'"


@dataclass(frozen=True)
class Rows:
    """The content of a file or table."""

    names: list[str] | None  # of the columns; None if every row has its own (JSON lines)
    rows: Iterator[Row]  # in order
    classes: list[str] | None = None  # names of the labels, if the table has them (``ClassLabel`` of datasets)


Reader = Callable[[Task, str, Path, Place], Rows]  # of a task, and of a file as errors call it


def check_names(task: Task, where: str, names: list[str]) -> None:
    """Check that columns have names of their own, and that the text columns of ``task`` are among them.

    Raises:
        UserError: two have one name, or none, or a column is missing; the message names the nearest.
    """
    if names.count("") > 1:
        raise UserError(f"{where} has {names.count('')} columns without a name; name or remove them")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where} has the column '{twice[0]}' twice; rename one")
    for column in task.text:
        if column not in names:
            raise UserError(f"{where} has no column '{column}'; {nearest(column, names)}")


def _class_names(task: Task, schema: pa.Schema) -> list[str] | None:
    """Return the class names in a table's metadata, in order of the numbers in the label column; None without any."""
    from datasets import Features

    try:
        feature: Any = Features.from_arrow_schema(schema)[task.label]
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):  # not written by the library
        return None
    return getattr(getattr(feature, "feature", feature), "names", None)


def from_table(task: Task, table: pa.Table) -> Rows:
    """Return the rows of an Arrow table."""
    rows = chain.from_iterable(map(_rows_of, table.to_batches(CHUNK)))
    return Rows(table.column_names, rows, _class_names(task, table.schema))


def _rows_of(batch: pa.RecordBatch) -> list[Row]:
    batch.validate(full=True)  # bytes that are not UTF-8
    return list(batch.to_pylist())


def _read_parquet(task: Task, where: str, file: Path, place: Place) -> Rows:
    import pyarrow.parquet as pq

    with _told(where, place):
        source = pq.ParquetFile(file)
    schema = source.schema_arrow
    wanted = (*task.text, *task.label_columns, task.label, "id", "idx", *task_type(task).extras)
    columns = [name for name in dict.fromkeys(wanted) if name in schema.names]

    def rows() -> Iterator[Row]:
        with _told(where, place):
            for batch in pq.ParquetFile(file).iter_batches(CHUNK, columns=columns):
                yield from _rows_of(batch)

    return Rows(schema.names, rows(), _class_names(task, schema))


@contextmanager
def _text(where: str, file: Path, place: Place, newline: str = "") -> Iterator[IO[str]]:
    """Open a text file; what it is not is one line."""
    with _told(where, place), file.open(encoding=place.codec, newline=newline) as stream:
        yield stream


@contextmanager
def _told(where: str, place: Place) -> Iterator[None]:
    """Turn an error of a library that reads a file into one line."""
    from pandas.errors import ParserError
    from pyarrow import ArrowException

    try:
        yield
    except UnicodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise _other_encoding(where, place, byte) from error
    except ParserError as error:
        reason = str(error).partition("C error: ")[2] or str(error)
        raise UserError(
            f"{where}: {reason.strip()}; --data.separator names another sign between fields; .csv alone has quotes"
        ) from error
    except (ArrowException, OSError) as error:
        raise UserError(f"{where} cannot be read: {str(error)[:160]}") from error


def _other_encoding(where: str, place: Place, found: str) -> UserError:
    encoding = place.encoding or "UTF-8"
    usual = "utf-16" if found in ("byte 0xff", "byte 0xfe", "it has NUL") else "cp1252"
    return UserError(f"{where} is no text in {encoding} ({found}); if it is text, give --data.encoding, e.g. {usual}")


def _first_line(where: str, file: Path, place: Place) -> str:
    """Return the first line of a file that is not empty, and has the encoding by its start."""
    with _text(where, file, place) as lines:
        first = lines.readline(2**20)
    if not first:
        raise UserError(f"{where} is empty (0 bytes)")
    if "\0" in first:
        raise _other_encoding(where, place, "it has NUL")
    with file.open("rb") as stream:
        if place.encoding and _is_utf8(stream.read(START), place.encoding):
            raise UserError(f"{where} is UTF-8, not {place.encoding}; leave --data.encoding out (null)")
    return first


def _is_utf8(start: bytes, encoding: str) -> bool:
    """Return whether a file begins as UTF-8, and not only ASCII, though its encoding should have a byte per letter."""
    one_byte = len(bytes(range(128, 256)).decode(encoding, errors="ignore")) > 64
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < START)
    except UnicodeDecodeError:
        return False
    return one_byte and not text.isascii()


def _read_separated(task: Task, where: str, file: Path, place: Place) -> Rows:
    """Return the rows of a table of text, whose fields stay text; one without a value is None.

    The sign between fields is the usual one of the suffix if the header has it, else the header's most frequent. In
    tables with tabs, GLUE's among them, quotes are ordinary characters; not in a .csv whose sign is given.
    """
    import pandas as pd
    from pandas.errors import EmptyDataError

    first, usual = _first_line(where, file, place), "\t" if file.suffix.lower() == ".tsv" else ","
    most = max(SEPARATORS, key=first.count)
    found = most if most in first and usual not in first else usual
    plain = (usual if place.separator else found) == "\t"
    options: dict[str, Any] = dict(
        sep=place.separator or found, header=None, dtype=object, na_filter=False, chunksize=CHUNK, engine="c",
        encoding=place.codec, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
    )  # fmt: skip

    def fields() -> Iterator[tuple[str, ...]]:
        with _told(where, place), suppress(EmptyDataError), pd.read_csv(file, **options) as frames:
            for frame in frames:
                yield from zip(*(frame[name].tolist() for name in frame), strict=True)

    rows = fields()
    header = list(next(rows, ()))
    if len(header) == 1 and place.separator is None and re.search(r"[^\w ]", header[0]):
        raise UserError(f"{where} has one column, {header[0]!r:.60}; --data.separator is the sign between fields")
    # there is no null in these formats: an empty field is a missing value
    # a column without a name is the index of pandas
    return Rows(header, ({n: field or None for n, field in zip(header, row, strict=True) if n} for row in rows))


def _read_text(task: Task, where: str, file: Path, place: Place) -> Rows:
    """Return the lines as the first text column; with their ends if they are one text."""
    first, ends = _first_line(where, file, place), "" if task_type(task).one_text else "\r\n"
    fields = {field.strip('" \r\n') for field in re.split(r"[,;\t|]", first)} - {""}
    if not task_type(task).one_text and ("\t" in first or first.startswith('{"') or fields & {*task.text, task.label}):
        raise UserError(f"{where} is a table or JSON by its first line, '{first.strip():.60}'; call it .csv or .jsonl")

    def rows() -> Iterator[Row]:
        with _text(where, file, place, "\n") as lines:
            for line in lines:
                yield {task.text[0]: line.rstrip(ends)}

    return Rows([task.text[0]], rows())


def _read_json(task: Task, where: str, file: Path, place: Place) -> Rows:
    """Return one row per line, or the rows of a file that is one value: a list, or one row."""
    _first_line(where, file, place)

    def rows() -> Iterator[Row]:
        values: Iterable[Any] = ()
        with _text(where, file, place) as stream:
            lines = filter(str.strip, stream)
            first, second = next(lines, "").strip(), next(lines, "")
            if second and first[0] == "{" and first[-1] == "}":
                values = (_parsed(where, row, line) for row, line in enumerate(chain([first, second], lines), start=1))
            elif first:
                value = _parsed(where, 1, f"{first}\n{second}{stream.read()}")
                values = value if isinstance(value, list) else [value]
            for number, value in enumerate(values, start=1):
                if not isinstance(value, dict):
                    kind = type(value).__name__
                    raise UserError(f"{where} row {number}: a JSON {kind}; give one object per line, or a list of them")
                yield value

    return Rows(None, rows())


def _parsed(where: str, row: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{where} row {row}: malformed JSON: {error.msg} ({place})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{where} row {row}: malformed JSON: {error}") from error


READERS: dict[str, Reader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_separated,
    ".tsv": _read_separated,
    ".txt": _read_text,
}
