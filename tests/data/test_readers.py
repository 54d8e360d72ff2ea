"""Every format reads the same rows, none is lost; a file that cannot be read is one line that names it."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from contents import classes, jsonl, own, parquet, sst2

from lit_compress.data.checks import KEPT
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files
from lit_compress.tasks.records import Task, get_task
from lit_compress.utils.errors import UserError

OWN = Task("custom", "classification", ("text",), ("1", "3"), ("accuracy",), None)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1334\n"
TABLE = parquet(sentence=["good", "bad", "film"] * 2000, label=[0, 1, 0] * 2000)
TWICE = parquet(pa.table([["a"], [1], ["b"]], names=["sentence", "label", "sentence"]))


def read(task, folder, name, content, **form):
    """Return the rows of a training file."""
    (folder / name).write_bytes(content)
    task = OWN if task == "custom" else get_task(task)
    return load_split_files(task, Place(str(folder), **form), ["train"])["train"]


# name -> task, name of the training file, its bytes, what the line says besides the file
REFUSED = {
    "classes of other names": ("sst2", "train.parquet", classes(["pos", "neg"], 0, 1), "has the classes pos, neg, the labels are negative, positive"),
    "no bytes": ("sst2", "train.csv", b"", "is empty (0 bytes)"),
    "no bytes in a table": ("sst2", "train.parquet", b"", "0 bytes"),
    "no rows": ("sst2", "train.csv", b"sentence,label\n", "has a header (sentence, label) and no rows"),
    "only blank lines in a table": ("sst2", "train.csv", b"\n\n", "has no column 'sentence'"),
    "damaged table": ("sst2", "train.parquet", TABLE[:40] + b"\xff" * 60 + TABLE[100:], "cannot be read: "),
    "bytes that are no text in a table": ("sst2", "train.parquet", parquet(sentence=pa.array([b"a", b"\xff"]).view(pa.string()), label=[0, 1]), "UTF8"),
    "numbers for texts": ("sst2", "train.parquet", parquet(sentence=[1, 2], label=[0, 1]), "row 1: 'sentence' is 1 (int); give text"),
    "words in a table are numbers": ("conll2003", "train.parquet", parquet(tokens=[[1, 2]], ner_tags=[[0, 0]]), "word 1: 'tokens' is 1 (int)"),
    "UTF-16": ("sst2", "train.csv", "sentence,label\na,1\n".encode("utf-16"), "no text in UTF-8 (byte 0xff); if it is text, give --data.encoding, e.g. utf-16"),
    "Latin-1 far below": ("sst2", "train.csv", b"sentence,label\n" + b"good,1\n" * 50_000 + "café,1\n".encode("latin-1"), "byte 0xe9"),
    "parquet called csv": ("sst2", "train.csv", TABLE, "no text in UTF-8"),
    "pointer": ("sst2", "train.csv", POINTER, "train.csv' is a Git LFS pointer, not the file itself; run git lfs pull"),
    "missing column": ("sst2", "train.csv", b"text,label\na,1\n", "has no column 'sentence'; valid: text, label"),
    "another sign between fields": ("sst2", "train.csv", b"sentence~label\na~1\n", "has one column, 'sentence~label'; --data.separator"),
    "a column twice": ("sst2", "train.csv", b"sentence,label,label\na,1,1\n", "'label' twice; rename one"),
    "a column twice in a table": ("sst2", "train.parquet", TWICE, "has the column 'sentence' twice; rename one"),
    "columns without names": ("sst2", "train.csv", b"sentence,label,,\na,1,,\n", "2 columns without a name"),
    "too many fields": ("sst2", "train.tsv", b"sentence\tlabel\na\t1\nb\tc\t1\n", "Expected 2 fields in line 3, saw 3; --data.separator"),
    "too few fields": ("sst2", "train.csv", b"sentence,label\na,1\nb\n", "row 2: the label is null"),
    "quote not closed": ("sst2", "train.csv", b'sentence,label\na,1\n"b,1\nc,1\n', "EOF inside string"),
    "table called txt": ("custom", "train.txt", b"id;text;label\n1;good;a\n", "a table or JSON by its first line, 'id;text;label'; call it .csv"),
    "JSON called txt": ("custom", "train.txt", own("a", "b"), "a table or JSON by its first line"),
    "table called JSON": ("sst2", "train.jsonl", b"sentence,label\na,1\n", "row 1: malformed JSON"),
    "broken JSON": ("sst2", "train.jsonl", sst2(1) + b'{"sentence": "a",\n', "row 2: malformed JSON"),
    "5000 brackets": ("sst2", "train.jsonl", b"[" * 100_000, "row 1: malformed"),
    "a list of lists": ("sst2", "train.json", b'[["a", 1]]', "row 1: a JSON list; give one object per line, or a list of them"),
    "columns in JSON": ("sst2", "train.json", b'{"sentence": ["a", "b"], "label": [1, 0]}', "row 1: 'sentence' is ['a', 'b'] (list); give text"),
    "objects on several lines": ("sst2", "train.json", b'{\n"sentence": "a"}\n{\n"sentence": "b"}\n', "malformed JSON: Extra data (line 3, column 1)"),
    "a list in an object": ("sst2", "train.json", b'{"version": "1", "data": [{"sentence": "a"}]}', "row 1 has no 'sentence'; valid: version, data"),
    "nested SQuAD": ("squad", "train.json", b'{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}', "row 1 has no 'question'; valid: data"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case, tmp_path):
    task, name, content, words = REFUSED[case]
    with pytest.raises(UserError) as caught:
        read(task, tmp_path, name, content)
    assert words in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert not list((tmp_path / "cache").glob("rows-*"))


ROWS = {"sentence": ['a, "b"', "ünï\tx", "1e5", "null", "NA", " ", "007"], "label": [1, 0, 1, 0, 1, 0, 1]}
LINES = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
TEXT = "sentence,label\n" + "".join(
    '"{}",{}\n'.format(row["sentence"].replace('"', '""'), row["label"]) for row in LINES
)
FORMS = {
    "train.parquet": parquet(**ROWS), "train.jsonl": jsonl(*LINES), "train.json": json.dumps(LINES, indent=1).encode(),
    "train.csv": TEXT.encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_format_has_the_same_rows_and_text_stays_text(tmp_path, name):
    assert read("sst2", tmp_path, name, FORMS[name]).to_dict() == ROWS


# name -> task, name of the file, its bytes, first text, number of rows, the note
READ = {
    "byte order mark": ("sst2", "train.csv", b"\xef\xbb\xbfsentence,label\ngood,1\n", "good", 1, ""),
    "Windows line ends": ("sst2", "train.tsv", b"sentence\tlabel\r\ngood\t1\r\nbad\t0\r\n", "good", 2, ""),
    "no line end at the end": ("sst2", "train.csv", b"sentence,label\ngood,1", "good", 1, ""),
    "blank lines": ("sst2", "train.csv", b"sentence,label\n\ngood,1\n\n\nbad,0\n\n", "good", 2, ""),
    "blanks around a text": ("sst2", "train.csv", b"sentence,label\n good ,1\nbad,0\n", " good ", 2, ""),
    "line end in quotes": ("sst2", "train.csv", b'sentence,label\r\n"good\r\nfilm",1\r\n', "good\r\nfilm", 1, ""),
    "quotes in TSV are text": ("sst2", "train.tsv", b'sentence\tlabel\n"good" film\t1\n"bad\t0\n', '"good" film', 2, ""),
    "quotes between tabs are text": ("sst2", "train.csv", b'sentence\tlabel\n"good\t1\nbad "film\t0\n', '"good', 2, ""),
    "a line of 1 MB": ("sst2", "train.csv", b"sentence,label\n" + b"good " * 200_000 + b",1\nbad,0\n", "good " * 200_000, 2, ""),
    "categories of pandas": ("sst2", "train.parquet", parquet(sentence=pa.array(["good", "bad"]).dictionary_encode(), label=[0, 1]), "good", 2, ""),
    "views of strings": ("sst2", "train.parquet", parquet(sentence=pa.array(["good", "bad"]).cast(pa.string_view()), label=[0, 1]), "good", 2, ""),
    "empty text": ("sst2", "train.jsonl", sst2(1) + sst2(0, text=" "), "good", 2, ""),
    "whole numbers stored as fractions": ("custom", "train.parquet", parquet(text=["good", "bad"] * 5, label=[1.0, 3.0] * 5), "good", 8, "8 of 10 rows are its train split"),
    "one row": ("sst2", "train.json", json.dumps(LINES[0], indent=1).encode(), LINES[0]["sentence"], 1, ""),
    "one row of words": ("conll2003", "train.json", b'{"tokens": ["a", "b"], "ner_tags": [0, 0]}', ["a", "b"], 1, ""),
    "answer written as text": ("squad", "train.csv", b"question,context,answers\nwas it?,good film,film\n", "was it?", 1, ""),
    "a place with a fraction of pandas": ("squad", "train.csv", b"question,context,answers,answer_start\nwas it?,film film,film,5.0\n", "was it?", 1, ""),
    "names of a table's numbers": ("sst2", "train.parquet", classes(["positive", "negative"], 0, 1), "good", 2, ""),
    "names of other letters": ("sst2", "train.parquet", classes(["Positive", "Negative"], 0, 1), "good", 2, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_it_is_read_and_no_row_is_lost(case, tmp_path, capsys):
    task, name, content, first, count, words = READ[case]
    rows = read(task, tmp_path, name, content)
    assert rows[0][rows.column_names[0]] == first and len(rows) == count
    err = capsys.readouterr().err
    assert words in err and err.count("note: ") == bool(words)
    if case.startswith("names"):
        assert rows["label"][:] == [1, 0]


def test_parts_that_number_their_classes_otherwise_are_refused(tmp_path):
    """Else one class of a part would be read as another."""
    for number, names in enumerate((["negative", "positive"], ["positive", "negative"])):
        (tmp_path / f"train-{number:05}-of-00002.parquet").write_bytes(classes(names, 0, 1))
    with pytest.raises(UserError, match=r"00001-of-00002.parquet' has the classes positive, negative, .*; number them"):
        load_split_files(get_task("sst2"), Place(str(tmp_path)), ["train"])


def test_the_index_that_pandas_writes_is_no_label(tmp_path):
    """Its column has no name, as the label of a kind without one."""
    (tmp_path / "train.csv").write_text(",text,other\n" + "".join(f"{i},good,film\n" for i in range(10)))
    task = replace(OWN, kind="embedding", text=("text", "other"), labels=(), label="")
    for labelled in (True, False):
        rows = load_split_files(task, Place(str(tmp_path)), ["train"], labelled)["train"]
        assert rows.column_names == ["text", "other"] + [KEPT] * (not labelled)


@pytest.mark.parametrize("first", ["", "in the end,", "good, , bad", '""'])
def test_a_first_line_with_an_empty_field_is_a_text(first, tmp_path):
    """Also of a kind without labels, whose label column has no name."""
    (tmp_path / "texts.txt").write_text(f"{first}\na film\n")
    task = replace(OWN, kind="embedding", labels=(), label="")
    rows = load_split_files(task, Place(str(tmp_path / "texts.txt")), ["all"], labelled=False)["all"]
    assert rows["text"][:] == [first, "a film"]


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "utf-8-sig"])
def test_other_encodings_are_read_if_they_are_given(tmp_path, encoding, name):
    content = FORMS[name].decode().encode(encoding, "ignore")
    assert read("sst2", tmp_path, name, content, encoding=encoding).to_dict() == ROWS


def test_the_same_bytes_in_two_encodings_are_two_contents(tmp_path):
    """One is not read from the cache of the other."""
    content = "sentence,label\n\u0444\u0438,1\n".encode("cp1251")
    texts = [read("sst2", tmp_path, "train.csv", content, encoding=e)["sentence"][0] for e in ("cp1251", "cp1252")]
    assert texts == ["\u0444\u0438", "\u00f4\u00e8"]


def test_utf8_is_not_read_as_another_encoding(tmp_path):
    content = "sentence,label\ncaf\u00e9 \u2713,1\n".encode()
    with pytest.raises(UserError, match="is UTF-8, not latin-1; leave --data"):
        read("sst2", tmp_path, "train.csv", content, encoding="latin-1")


@pytest.mark.parametrize("sign", ["~", ";", "\t"])
def test_a_sign_between_fields_that_is_given(tmp_path, sign):
    content = f'sentence{sign}label\n"a,{sign}b"{sign}1\n'.encode()
    assert read("sst2", tmp_path, "train.csv", content, separator=sign)["sentence"][:] == [f"a,{sign}b"]


def test_the_only_column_may_have_any_name(tmp_path):
    """The line on a column that may be several says which option decides it."""
    task, file = replace(OWN, text=("review-text",)), tmp_path / "new.csv"
    file.write_text("review-text\ngood\n")
    with pytest.raises(UserError, match=r"has one column, 'review-text'; --data\.separator is"):
        load_split_files(task, Place(str(file)), ["all"], labelled=False)
    rows = load_split_files(task, Place(str(file), separator=","), ["all"], labelled=False)["all"]
    assert rows["review-text"][:] == ["good"]


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ({"encoding": "cp125"}, "data.encoding: 'cp125' is no text encoding; did you mean 'cp1252'"),
        ({"encoding": "base64"}, "data.encoding: 'base64' is no text encoding"),
        ({"separator": "||"}, "data.separator: '||' is not one character"),
    ],
    ids=str,
)
def test_a_form_that_is_none_is_one_line(form, line):
    with pytest.raises(UserError, match=line.replace("|", r"\|")):
        Place("rows", **form)


def test_texts_with_commas_are_texts(tmp_path):
    """Without the line ends, which are tokens for some models; plain text for language models keeps them."""
    (tmp_path / "new.txt").write_bytes(b"good, the film\nbad, bad film\r\n \n[good] film")
    rows = load_split_files(OWN, Place(str(tmp_path / "new.txt")), ["all"], labelled=False)["all"]
    assert rows["text"][:] == ["good, the film", "bad, bad film", " ", "[good] film"]
    rows = load_split_files(get_task("plain_text"), Place(str(tmp_path / "new.txt")), ["all"])["all"]
    assert rows["text"][:2] == ["good, the film\n", "bad, bad film\r\n"]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_a_header_says_the_sign_between_fields(tmp_path, sign):
    content = f"\ufeffsentence{sign}label\na, b{sign}1\n".encode()
    assert read("sst2", tmp_path, "train.csv", content)["sentence"][:] == ["a, b"]
