"""Bytes of a text file -> its lines; for another encoding the error names the likely one."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from lit_compress.utils.errors import UserError, nearest

UTF8 = "utf-8"
SAMPLE = 2**20  # bytes that are looked at to name an encoding
# first bytes -> what such a file is; none of them is text
_BINARY = {
    b"PAR1": "a parquet file; call it .parquet",
    b"\x1f\x8b": "packed by gzip; unpack it, or let its name end with .gz",
    b"PK\x03\x04": "an Excel file or a zip archive; save it as .csv",
    b"\xd0\xcf\x11\xe0": "an Excel file; save it as .csv",
    b"SQLite format 3": "a database; export a table as .csv",
    b"ARROW1": "an Arrow file; save it as .parquet",
}
# encodings in which text is found by characters that only such text has; the last fits every text of Western Europe.
# charset-normalizer 3.5.3 takes a small CSV in Japanese cp932 for Korean, and one in French cp1252 for mac_latin2
_LIKELY = (
    ("cp932", r"[\u3040-\u30ff]", 0.3),
    ("cp1251", r"[\u0430-\u045f]", 0.6),
    ("cp949", r"[\uac00-\ud7a3]", 0.8),
    ("gb18030", r"[\u4e00-\u9fff\u3000-\u303f\uff00-\uffef]", 0.9),
    ("cp1252", r"[\u00c0-\u00ff\u2013-\u2026\u20ac\u00a0-\u00bf]", 0.5),
)


def check_encoding(name: str) -> None:
    """Refuse an unknown name of a text encoding.

    Raises:
        UserError: Python knows none of this name.
    """
    try:
        "".encode(name)
    except (LookupError, ValueError) as error:
        names = (UTF8, "utf-16", *(likely for likely, *_ in _LIKELY), "latin-1")
        raise UserError(f"data.encoding: '{name}' is no text encoding; {nearest(name, names)}") from error


def likely_encoding(raw: bytes) -> str | None:
    """Return the name of the encoding that ``raw``, the beginning of a text file, is probably in; None: no idea."""
    if raw.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if (zeros := raw.count(0)) > len(raw) // 4:
        return "utf-16-be" if raw[::2].count(0) > zeros // 2 else "utf-16-le"
    if _is_utf8(raw):
        return UTF8
    runs = re.findall(rb"[\x80-\xff]+", raw)
    alone = sum(map(len, runs)) < 2 * len(runs)  # as accents are; other scripts fill words
    for name, wanted, share in _LIKELY[:1] + (_LIKELY[-1:] if alone else _LIKELY[1:]):
        letters = re.findall(r"[^\x00-\x7f]", raw.decode(name, errors="ignore"))
        if letters and sum(bool(re.match(wanted, letter)) for letter in letters) >= share * len(letters):
            return name
    return None


def _is_utf8(raw: bytes) -> bool:
    """Return whether the bytes are UTF-8; the last character may be cut."""
    try:
        raw.decode(UTF8)
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def text_lines(where: str, file: Path, encoding: str = UTF8, any_end: bool = False) -> Iterator[str]:
    """Yield the lines of a text file with their ends, a byte order mark left out.

    Args:
        where: how errors call the file.
        file: not empty.
        encoding: of the file.
        any_end: a line also ends at a lone carriage return.

    Raises:
        UserError: the file is empty, no text, or in another encoding; the likely one is named.
    """
    try:
        with _open(file) as stream:
            sample = stream.read(SAMPLE)
        if not sample:
            raise UserError(f"{where} is empty (0 bytes)")
        for mark, what in _BINARY.items():
            if sample.startswith(mark):
                raise UserError(f"{where} is {what}")
        lines = _utf8(where, file, sample) if _is_same(encoding, UTF8) else _decoded(where, file, encoding, sample)
        yield from _split_at_returns(lines) if any_end else lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{where} is no whole gzip file: {error}") from error


UNPACKED, TIMES = (
    2**28,
    200,
)  # bytes that any file may unpack to, and how many times its size; text shrinks 3 to 20 times


def most_unpacked(file: Path) -> int:
    """Return to how many bytes a packed file may unpack."""
    return max(UNPACKED, TIMES * file.stat().st_size)


def check_unpacked(where: str, size: int, most: int) -> None:
    """Refuse a file that unpacks to more than text does.

    Args:
        where: how errors call the file.
        size: bytes it unpacks to, as far as known.
        most: bytes, see :func:`most_unpacked`.

    Raises:
        UserError: it does.
    """
    if size > most:
        raise UserError(
            f"{where} unpacks to more than {most:,} bytes, {TIMES} times its size, as no text does; give it as "
            "an unpacked .jsonl"
        )


class _Unpacked(RawIOBase):
    """The bytes of a gzip file, up to :func:`most_unpacked`."""

    def __init__(self, file: Path) -> None:
        self.where, self.most, self.total = f"data.path: '{file}'", most_unpacked(file), 0
        self.packed = gzip.open(file)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.packed.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        size = self.packed.readinto(buffer)
        self.total += size
        check_unpacked(self.where, self.total, self.most)
        return size


def _open(file: Path) -> IO[bytes]:
    """Open a file for reading; one whose name ends with .gz is unpacked."""
    return BufferedReader(_Unpacked(file)) if file.suffix.lower() == ".gz" else file.open("rb")


def _is_same(first: str, second: str) -> bool:
    """Return whether two names mean the same encoding."""
    import codecs

    return codecs.lookup(first).name == codecs.lookup(second).name


def _utf8(where: str, file: Path, sample: bytes) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; errors name the byte."""
    offset = 0
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode(UTF8)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} line {number}: byte {offset + error.start} (0x{line[error.start]:02x}) is not UTF-8; "
                    + _advice(line if number > 1 and len(sample) == SAMPLE else sample)
                ) from error
            if b"\0" in line:
                at = offset + line.index(b"\0")
                raise UserError(f"{where} line {number}: byte {at} is NUL; {_advice(sample)}")
            offset += len(line)
            yield text.removeprefix("\ufeff") if number == 1 else text


def _decoded(where: str, file: Path, encoding: str, sample: bytes) -> Iterator[str]:
    """Yield the lines of a file in an encoding that the user gave."""
    one_byte = sum(len(bytes([byte]).decode(encoding, errors="ignore")) for byte in range(128, 256)) > 64
    if one_byte and not sample.isascii() and _is_utf8(sample):
        raise UserError(f"{where} is UTF-8, not {encoding}; leave --data.encoding out (null)")
    with TextIOWrapper(_open(file), encoding=encoding, newline="\n") as stream:
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                if "\0" in line:
                    raise UserError(f"{where} line {number}: NUL in {encoding}; {_advice(sample)}")
                yield line.removeprefix("\ufeff") if number == 1 else line
        except UnicodeError as error:
            raise UserError(f"{where} after line {number}: bytes that are not {encoding}; {_advice(sample)}") from error


def _advice(raw: bytes) -> str:
    """Return the advice for a file that cannot be read in the expected encoding."""
    likely = likely_encoding(raw)
    if likely == UTF8:
        return (
            "it is UTF-8; leave --data.encoding out (null)" if b"\0" not in raw else "save the file as plain UTF-8 text"
        )
    given = f"--data.encoding {likely} may be right; else " if likely else ""
    return f"{given}give --data.encoding, or save the file as UTF-8"


def _split_at_returns(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines, those with carriage returns inside in parts."""
    for line in lines:
        if "\r" in line[:-2] or line.endswith("\r"):
            yield from filter(None, re.split(r"(?<=\r)(?!\n)", line))
        else:
            yield line
