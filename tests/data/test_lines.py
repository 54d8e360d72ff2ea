"""Encodings: read when they are given, named when they are not; line ends of every kind."""

import gzip

import pytest

from lit_compress.data.lines import check_encoding, likely_encoding, text_lines
from lit_compress.utils.errors import UserError

TEXTS = {
    "German": ("Für ältere Häuser gilt: die Größe, die Höhe und „mehr“.", ["cp1252"]),
    "French": ("Le café était très agréable, déjà l'été où ça coûte cher", ["cp1252", "latin-1"]),
    "Spanish": ("El niño comió más jamón. ¿Qué pasó, señor?", ["cp1252"]),
    "Russian": ("Этот фильм был очень хорош, но немного длинный", ["cp1251"]),
    "Japanese": ("この映画はとても良かったです。カメラがきれい", ["cp932"]),
    "Chinese": ("这部电影非常好,我很喜欢它的音乐。", ["gb18030"]),
    "Korean": ("이 영화는 정말 좋았습니다 추천합니다", ["cp949"]),
}


@pytest.mark.parametrize("language", TEXTS)
def test_the_likely_encoding_is_the_one(language):
    text, encodings = TEXTS[language]
    for encoding in encodings:
        assert likely_encoding(text.encode(encoding)) == encodings[0]
    for encoding in ("utf-8", "utf-16", "utf-32"):
        assert likely_encoding(text.encode(encoding)) == encoding


def test_the_likely_encoding_of_ascii_without_a_mark():
    assert likely_encoding("review,stars\n".encode("utf-16-le")) == "utf-16-le"
    assert likely_encoding("review,stars\n".encode("utf-16-be")) == "utf-16-be"
    assert likely_encoding(b"review,stars\n") == "utf-8"


def lines(tmp_path, content, *args, **options):
    (tmp_path / "file").write_bytes(content)
    return list(text_lines("it", tmp_path / "file", *args, **options))


@pytest.mark.parametrize("encoding", ["utf-8", "utf8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "utf-32"])
def test_a_file_in_an_encoding_that_is_given(tmp_path, encoding):
    assert lines(tmp_path, "é,1\r\nü\n\nä".encode(encoding), encoding) == ["é,1\r\n", "ü\n", "\n", "ä"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lone_carriage_returns_end_lines_where_that_is_asked(tmp_path, encoding):
    content = "a\rb\r\nc\n\rd\r".encode(encoding)
    assert lines(tmp_path, content, encoding, any_end=True) == ["a\r", "b\r\n", "c\n", "\r", "d\r"]
    assert lines(tmp_path, content, encoding) == ["a\rb\r\n", "c\n", "\rd\r"]


@pytest.mark.parametrize(
    ("content", "encoding", "words"),
    [
        (b"", "utf-8", "0 bytes"),
        (
            "caf\u00e9 d\u00e9j\u00e0\n".encode("cp1252"),
            "utf-8",
            "line 1: byte 3 (0xe9) is not UTF-8; --data.encoding cp1252 may be",
        ),
        ("Этот фильм\n".encode("cp1251"), "utf-8", "--data.encoding cp1251 may be right; else give --data.encoding"),
        ("a\n".encode("utf-16"), "utf-8", "--data.encoding utf-16 may be right"),
        ("a,b\n".encode("utf-16-le"), "utf-8", "NUL; --data.encoding utf-16-le may be right"),
        ("caf\u00e9\n".encode(), "cp1252", "is UTF-8, not cp1252; leave --data.encoding out"),
        ("caf\u00e9\n".encode("cp1252"), "cp932", "bytes that are not cp932; --data.encoding cp1252"),
        (b"abc\n", "utf-16", "bytes that are not utf-16; it is UTF-8; leave --data.encoding out"),
        (b"PAR1....", "utf-8", "a parquet file; call it .parquet"),
        (b"PK\x03\x04....", "utf-8", "an Excel file or a zip archive"),
        (b"\x1f\x8b....", "utf-8", "packed by gzip; unpack it"),
    ],
)
def test_what_is_no_such_text_is_one_line(tmp_path, content, encoding, words):
    with pytest.raises(UserError) as caught:
        lines(tmp_path, content, encoding)
    assert words in str(caught.value) and str(caught.value).startswith("it ")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_file_packed_by_gzip_is_read(tmp_path, encoding):
    path = tmp_path / "texts.csv.GZ"
    path.write_bytes(gzip.compress("text\ncaf\u00e9\n".encode(encoding)))
    assert list(text_lines("it", path, encoding)) == ["text\n", "caf\u00e9\n"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="it is no whole gzip file"):
        list(text_lines("it", path, encoding))
    path.write_bytes(b"text\n")
    with pytest.raises(UserError, match="it is no whole gzip file"):
        list(text_lines("it", path, encoding))


def test_a_wrong_byte_far_below_is_found_in_a_long_file(tmp_path):
    with pytest.raises(UserError, match=r"line 300001: byte 2400005 .*data.encoding cp1252"):
        lines(tmp_path, b"good,1.\n" * 300_000 + "d\u00e9j\u00e0 vu\n".encode("cp1252").rjust(12))


@pytest.mark.parametrize("name", ["utf9", "base64", "latin2x"])
def test_no_encoding_is_one_line(name):
    with pytest.raises(UserError, match=rf"data.encoding: '{name}' is no text encoding; "):
        check_encoding(name)
