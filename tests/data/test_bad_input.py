"""A corpus of broken inputs: each is one line that names file and row, or is read as documented, no row lost."""

import json

import datasets
import pyarrow as pa
import pytest
from contents import classes, jsonl, ner, own, parquet, qa, sst2

from lit_compress.data.datamodule import DataModule
from lit_compress.tasks.records import Custom
from lit_compress.utils import progress
from lit_compress.utils.errors import UserError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1334\n"
GOOD = {"sst2": sst2(0, 1), "conll2003": ner(["bad"], ["B-PER"]), "squad": qa("film", 5), "squad_v2": qa("film", 5)}
TABLE = parquet(sentence=["good", "bad", "film"] * 2000, label=[0, 1, 0] * 2000)
TWICE = parquet(pa.table([["a"], [1], ["b"]], names=["sentence", "label", "sentence"]))
PAIR = b"sentence1,sentence2,label\n"

# name -> task, name of the training file, its bytes, what the line says besides the file
REFUSED = {
    # files
    "no bytes": ("sst2", "train.csv", b"", ["0 bytes"]),
    "no rows": ("sst2", "train.csv", b"sentence,label\n", ["has a header (sentence, label) and no rows"]),
    "no rows in a table": ("sst2", "train.parquet", parquet(sentence=pa.array([], pa.string()), label=pa.array([], pa.int64())), ["has a header (sentence, label) and no rows"]),
    "only blank lines": ("sst2", "train.jsonl", b"\n\n", ["has no rows"]),
    "truncated table": ("sst2", "train.parquet", TABLE[:-60], ["no readable parquet"]),
    "half a table": ("sst2", "train.parquet", TABLE[: len(TABLE) // 2], ["no readable parquet"]),
    "damaged table": ("sst2", "train.parquet", TABLE[:40] + b"\xff" * 60 + TABLE[100:], ["no readable parquet"]),
    "text called parquet": ("sst2", "train.parquet", b"sentence,label\na,1\n", ["no readable parquet"]),
    "UTF-16": ("sst2", "train.csv", "sentence,label\na,1\n".encode("utf-16"), ["line 1", "byte 0", "UTF-8"]),
    "UTF-16 without a mark": ("sst2", "train.csv", "sentence,label\na,1\n".encode("utf-16-le"), ["line 1", "byte 1", "NUL"]),
    "Latin-1": ("sst2", "train.tsv", "sentence\tlabel\ncafé\t1\n".encode("latin-1"), ["line 2", "0xe9", "UTF-8"]),
    "NUL byte": ("sst2", "train.csv", b"sentence,label\na,1\nb\0,1\n", ["line 3", "byte 20", "NUL"]),
    "NUL byte in JSON": ("sst2", "train.jsonl", sst2(1) + b"\0\n", ["line 2", "NUL"]),
    "bytes that are no text in a table": ("sst2", "train.parquet", parquet(sentence=pa.array([b"a", b"\xff"]).view(pa.string()), label=[0, 1]), ["UTF8"]),
    "half a character": ("sst2", "train.jsonl", sst2(1) + sst2(1, text="a\ud800"), ["row 2", "character at 1"]),
    # rows and columns
    "missing column": ("sst2", "train.csv", b"text,label\na,1\n", ["no column 'sentence'"]),
    "misspelt column": ("sst2", "train.csv", b"sentense,label\na,1\n", ["did you mean 'sentense'?"]),
    "no label column": ("sst2", "train.csv", b"sentence\na\n", ["no column 'label'"]),
    "column missing in a row": ("sst2", "train.jsonl", sst2(1) + b'{"label": 1}\n', ["row 2", "no 'sentence'"]),
    "the second text is missing": ("mrpc", "train.csv", b"sentence1,label\na,1\n", ["no column 'sentence2'"]),
    "a column twice": ("sst2", "train.csv", b"sentence,label,label\na,1,1\n", ["'label' twice"]),
    "a column twice in a table": ("sst2", "train.parquet", TWICE, ["has the column 'sentence' twice; rename one"]),
    "a header alone": ("custom", "train.csv", b"text,label\n", ["has a header (text, label) and no rows"]),
    "too few fields": ("sst2", "train.csv", b"sentence,label\na,1\nb\n", ["row 2", "1 fields"]),
    "too many fields": ("sst2", "train.tsv", b"sentence\tlabel\na\t1\nb\tc\t1\n", ["row 2", "3 fields"]),
    "quote not closed": ("sst2", "train.csv", b'sentence,label\na,1\n"b,1\nc,1\n', ["row 2"]),
    "text after a quote": ("sst2", "train.csv", b'sentence,label\n"a"b,1\n', ["row 1", "expected after"]),
    "broken JSON": ("sst2", "train.jsonl", sst2(1) + b'{"sentence": "a",\n', ["row 2", "malformed"]),
    "a list of lists": ("sst2", "train.json", b'[["a", 1]]', ["row 1", "list"]),
    "number of 5000 digits": ("sst2", "train.jsonl", b'{"sentence": "a", "label": ' + b"9" * 5000 + b"}", ["row 1", "malformed"]),
    "5000 brackets": ("sst2", "train.jsonl", b"[" * 100_000, ["row 1", "malformed"]),
    # another format than the name says
    "table called txt": ("custom", "train.txt", b"id,text,label\n1,good,a\n2,bad,b\n", ["a table by its first line, 'id,text,label'", "call it .csv"]),
    "JSON called csv": ("sst2", "train.csv", sst2(0, 1), ["is JSON by its first line", "call it .jsonl"]),
    "list of JSON called tsv": ("sst2", "train.tsv", b"[\n" + sst2(1).strip() + b"\n]", ["is JSON by its first line"]),
    "table called JSON": ("sst2", "train.jsonl", b"sentence,label\na,1\n", ["a table by its first line", "call it .csv"]),
    "parquet called csv": ("sst2", "train.csv", TABLE, ["is a parquet file; call it .parquet"]),
    "parquet called JSON": ("sst2", "train.json", TABLE, ["is a parquet file; call it .parquet"]),
    "Excel called csv": ("sst2", "train.csv", b"PK\x03\x04rest", ["an Excel file or a zip archive; save it as .csv"]),
    "gzip called csv": ("sst2", "train.csv", b"\x1f\x8brest", ["packed by gzip"]),
    "pointer called csv": ("sst2", "train.csv", POINTER, ["train.csv' is a Git LFS pointer, not the file itself; run git lfs pull"]),
    "pointer called parquet": ("sst2", "train.parquet", POINTER, ["is a Git LFS pointer"]),
    "pointer called JSON": ("custom", "train.jsonl", POINTER, ["is a Git LFS pointer"]),
    "UTF-16 JSON": ("sst2", "train.json", sst2(0, 1).decode().encode("utf-16"), ["--data.encoding utf-16 may be right"]),
    "columns without names": ("sst2", "train.csv", b"sentence,label,,\na,1,,\n", ["2 columns without a name"]),
    "two lists in an object": ("sst2", "train.json", b'{"train": [{"sentence": "a"}], "test": [{"sentence": "a"}]}', ["the lists train, test"]),
    "SQuAD for a class": ("sst2", "train.json", json.dumps({"data": [{"paragraphs": []}]}).encode(), ["is a file of SQuAD"]),
    # texts
    "null text": ("sst2", "train.jsonl", sst2(1) + b'{"sentence": null, "label": 1}', ["row 2", "null"]),
    "null text in a table": ("sst2", "train.parquet", parquet(sentence=["a", None], label=[0, 1]), ["row 2", "null"]),
    "empty field": ("sst2", "train.csv", b"sentence,label\na,1\n,1\n", ["row 2", "null"]),
    "number for text": ("sst2", "train.jsonl", b'{"sentence": 5, "label": 1}', ["row 1", "5 (int)"]),
    "numbers for texts": ("sst2", "train.parquet", parquet(sentence=[1, 2], label=[0, 1]), ["'sentence' is of type int64"]),
    "list for text": ("sst2", "train.jsonl", b'{"sentence": ["a"], "label": 1}', ["row 1", "(list)"]),
    # labels
    "fractions for classes": ("custom", "train.csv", b"text,label\ngood,1\nbad,2.5\n", ["row 2", "fraction", "kind regression", "data.custom.labels"]),
    "blanks for a label": ("custom", "train.csv", b"text,label\ngood,a\nbad,  \n", ["row 2", "null"]),
    "null label": ("sst2", "train.jsonl", sst2(1, None), ["row 2", "null"]),
    "NaN label": ("sst2", "train.jsonl", sst2(1, float("nan")), ["row 2", "null"]),
    "NaN label in a table": ("sst2", "train.parquet", parquet(sentence=["a", "b"], label=[1.0, float("nan")]), ["row 2", "null"]),
    "empty label": ("sst2", "train.csv", b"sentence,label\na,1\nb,\n", ["row 2", "null"]),
    "label out of range": ("sst2", "train.jsonl", sst2(0, 2), ["row 2", "label 2"]),
    "number beyond the names of a table": ("sst2", "train.parquet", classes(["positive", "negative"], 0, 2), ["row 2", "label 2"]),
    "misspelt label": ("sst2", "train.jsonl", sst2(0, "positiv"), ["row 2", "did you mean 'positive'?"]),
    "fraction for a class": ("sst2", "train.jsonl", sst2(0, 0.5), ["row 2", "0.5"]),
    "truth value for a class": ("sst2", "train.jsonl", sst2(0, True), ["row 2", "True"]),
    "list for a class": ("sst2", "train.jsonl", sst2(0, [1]), ["row 2", "[1]"]),
    "digits without end": ("sst2", "train.csv", b"sentence,label\na," + b"1" * 5000 + b"\n", ["row 1", "none of task"]),
    "one row unlabelled": ("sst2", "train.jsonl", sst2(1, -1), ["row 2", "-1"]),
    "all rows unlabelled": ("sst2", "train.jsonl", sst2(-1, -1), ["no labels"]),
    "labels begin late": ("sst2", "train.jsonl", sst2(-1, 1), ["row 2", "row 1 has none"]),
    "score is a word": ("stsb", "train.csv", PAIR + b"a,b,2\na,b,high\n", ["row 2", "'high'", "finite"]),
    "score is infinite": ("stsb", "train.csv", PAIR + b"a,b,2\na,b,1e999\n", ["row 2", "finite"]),
    "score is a truth value": ("stsb", "train.jsonl", jsonl({"sentence1": "a", "sentence2": "b", "label": True}), ["row 1", "True", "finite"]),
    "score is null": ("stsb", "train.parquet", parquet(sentence1=["a"], sentence2=["b"], label=pa.array([None], pa.float32())), ["row 1", "null"]),
    # tagging
    "fewer tags than words": ("conll2003", "train.jsonl", ner(["a", "b"], [0]), ["row 2", "2 words", "1 labels"]),
    "more tags than words": ("conll2003", "train.jsonl", ner(["a"], [0, 0]), ["row 2", "1 words", "2 labels"]),
    "unknown tag": ("conll2003", "train.jsonl", ner(["a", "b"], ["O", "B-PRE"]), ["row 2 word 2", "did you mean 'B-PER'?"]),
    "tag out of range": ("conll2003", "train.jsonl", ner(["a"], [9]), ["row 2 word 1", "label 9"]),
    "null tag": ("conll2003", "train.jsonl", ner(["a"], [None]), ["row 2 word 1", "null"]),
    "one tag for all": ("conll2003", "train.jsonl", ner(["a"], 0), ["row 2", "give a list"]),
    "no words": ("conll2003", "train.jsonl", ner([], []), ["row 2", "no words"]),
    "empty word": ("conll2003", "train.jsonl", ner(["a", ""], [0, 0]), ["row 2", "word 2", "give text"]),
    "null word": ("conll2003", "train.jsonl", ner(["a", None], [0, 0]), ["row 2 word 2", "null"]),
    "number for a word": ("conll2003", "train.jsonl", ner(["a", 7], [0, 0]), ["row 2 word 2", "7 (int)"]),
    "words in a table are numbers": ("conll2003", "train.parquet", parquet(tokens=[[1, 2]], ner_tags=[[0, 0]]), ["list<"]),
    # answers
    "answer not in the context": ("squad", "train.jsonl", qa("bad", 0), ["row 2", "not in the context"]),
    "offset one off": ("squad", "train.jsonl", qa("film", 4), ["row 2", "not at character 4", "nearest: 5"]),
    "offset in bytes": ("squad", "train.jsonl", qa("film", 6, context="gööd film"), ["row 2", "nearest: 5"]),
    "offset beyond the end": ("squad", "train.jsonl", qa("film", 99), ["row 2", "nearest: 5"]),
    "negative offset": ("squad", "train.jsonl", qa("film", -4), ["row 2", "nearest: 5"]),
    "offset is a word": ("squad", "train.jsonl", qa("film", "five"), ["row 2", "no whole number"]),
    "answer of other case": ("squad", "train.jsonl", qa("Film", 5), ["row 2", "not in the context"]),
    "empty answer": ("squad", "train.jsonl", qa("", 0), ["row 2", "give text"]),
    "question without answer": ("squad", "train.jsonl", qa("", 0, answers={"text": [], "answer_start": []}), ["row 2", "no answer", "squad_v2"]),
    "more offsets than answers": ("squad_v2", "train.jsonl", qa("", 0, answers={"text": ["film"], "answer_start": [5, 5]}), ["row 2", "of one length"]),
    "answers are a number": ("squad_v2", "train.jsonl", qa("", 0, answers=3), ["row 2", "answers"]),
    "ids twice": ("squad", "train.jsonl", qa("film", 5, id="1"), ["row 2", "id '1'", "row 1"]),
    "null id": ("squad", "train.jsonl", qa("film", 5, id=None), ["row 2", "'id' is null"]),
    "no context": ("squad", "train.csv", b"question,answers\na,b\n", ["no column 'context'"]),
    # the user's own task
    "labels of several types": ("custom", "train.jsonl", own("a", "b", 1), ["row 3", "int", "str"]),
    "number and truth value": ("custom", "train.jsonl", own(1, 0, True), ["row 3", "bool"]),
    "one label only": ("custom", "train.jsonl", own("a", "a"), ["all labels are 'a'"]),
    "own null label": ("custom", "train.jsonl", own("a", None), ["row 2", "null"]),
    "own tags are a number": ("custom-tagging", "train.jsonl", jsonl({"tokens": ["a"], "tags": 3}), ["row 1", "give a list"]),
    "own tags are null": ("custom-tagging", "train.jsonl", jsonl({"tokens": ["a"], "tags": None}), ["row 1", "give a list"]),
    "own label is an object": ("custom", "train.jsonl", own("a", {"x": 1}), ["row 2", "neither text"]),
    "own column is missing": ("custom", "train.csv", b"txt,label\na,1\nb,0\n", ["'text'", "did you mean 'txt'?"]),
    "own label column is missing": ("custom", "train.csv", b"text,stars\na,1\nb,0\n", ["'label'", "text, stars"]),
}  # fmt: skip


def module(task, backbone, folder, **options):
    task, _, kind = task.partition("-")
    return DataModule(task, backbone, str(folder), **({"custom": Custom(kind=kind)} if kind else {}), **options)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "_noted", set())


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case, tmp_path, backbone):
    task, name, content, words = REFUSED[case]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "validation.jsonl").write_bytes(GOOD.get(task, content))
    with pytest.raises(UserError) as caught:
        module(task, backbone, folder).setup("fit")
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    assert all(word in line for word in [str(folder / name), *words]), line
    assert not [entry for entry in (tmp_path / "cache").glob("*") if entry.name.startswith((".", "encoded"))]


# name -> task, the files' bytes, rows that must be there, what is said of them
READ = {
    "byte order mark": ("sst2", {"train.csv": b"\xef\xbb\xbfsentence,label\ngood,1\n"}, 1, []),
    "byte order mark in JSON": ("sst2", {"train.jsonl": b"\xef\xbb\xbf" + sst2(1)}, 1, []),
    "Windows line ends": ("sst2", {"train.tsv": b"sentence\tlabel\r\ngood\t1\r\nbad\t0\r\n"}, 2, []),
    "Windows line ends in JSON": ("sst2", {"train.jsonl": sst2(0, 1).replace(b"\n", b"\r\n")}, 2, []),
    "no line end at the end": ("sst2", {"train.csv": b"sentence,label\ngood,1"}, 1, []),
    "blank lines": ("sst2", {"train.csv": b"sentence,label\n\ngood,1\n\n\nbad,0\n"}, 2, []),
    "line end in quotes": ("sst2", {"train.csv": b'sentence,label\n"good\nfilm",1\n'}, 1, []),
    "quotes in TSV are text": ("sst2", {"train.tsv": b'sentence\tlabel\n"good\t1\n'}, 1, []),
    "a line of 1 MB": ("sst2", {"train.csv": b"sentence,label\n" + b"good " * 200_000 + b",1\nbad,0\n"}, 2, ["1 of 2 inputs are longer"]),
    "empty text in JSON": ("sst2", {"train.jsonl": sst2(1) + sst2(0, text=" ")}, 2, ["empty in 1 of 2 rows", "row 2"]),
    "digits for classes": ("sst2", {"train.csv": b"sentence,label\ngood,1\nbad,0\n"}, 2, []),
    "whole numbers stored as fractions": ("custom", {"train.parquet": parquet(text=["good", "bad"], label=[1.0, 3.0])}, 2, []),
    "rows twice": ("sst2", {"train.jsonl": sst2(1, 1)}, 2, []),
    "categories of pandas": ("sst2", {"train.parquet": parquet(sentence=pa.array(["good", "bad"]).dictionary_encode(), label=[0, 1])}, 2, []),
    "unknown characters only": ("sst2", {"train.jsonl": sst2(1, text="\u200b\u0007")}, 1, []),
    "list of rows": ("sst2", {"train.json": b'[{"sentence": "a", "label": 1},\n {"sentence": "b", "label": 0}]'}, 2, []),
    "columns of pandas": ("sst2", {"train.json": b'{"sentence":{"0":"a","1":"b"},"label":{"0":1,"1":0}}'}, 2, []),
    "objects on several lines": ("sst2", {"train.json": b'{\n"sentence": "a",\n"label": 1\n}\n{\n"sentence": "b", "label": 0}\n'}, 2, []),
    "nested SQuAD": ("squad", {"train.json": json.dumps({"data": [{"paragraphs": [{"context": "good film", "qas": [
        {"id": "a", "question": "was it?", "answers": [{"text": "film", "answer_start": 5}]}]}]}], "version": "1.1"}).encode()}, 1, []),
    "mixed line ends": ("sst2", {"train.csv": b"sentence,label\rgood,1\nbad,0\r\nfilm,1\r"}, 3, []),
    "old line ends": ("sst2", {"train.tsv": b"sentence\tlabel\rgood\t1\rbad\t0\r"}, 2, []),
    "mixed line ends in JSON": ("sst2", {"train.jsonl": sst2(0, 1).replace(b"\n", b"\r", 1)}, 2, []),
    "quoted tabs in TSV": ("sst2", {"train.tsv": b'sentence\tlabel\n"good\tfilm"\t1\n"a ""bad"" one"\t0\n'}, 2, []),
    "quoted line ends in TSV": ("sst2", {"train.tsv": b'sentence\tlabel\n"good\nfilm"\t1\nbad\t0\n'}, 2, []),
    "a mark and semicolons": ("sst2", {"train.csv": b'\xef\xbb\xbfsentence;label\ngood;1\nbad;0\n'}, 2, ["separated by ';'"]),
    "semicolons": ("sst2", {"train.csv": b'sentence;label\n"good; film, bad";1\nbad;0\n'}, 2, ["separated by ';'"]),
    "bars": ("sst2", {"train.csv": b'sentence|label\n"good| film, bad"|1\nbad|0\n'}, 2, ["separated by '|'"]),
    "first line for Excel": ("sst2", {"train.csv": b'\xef\xbb\xbfsep=,\r\nsentence,label\r\ngood,1\r\nbad,0\r\n'}, 2, []),
    "first line for Excel with bars": ("sst2", {"train.csv": b'"sep=|"\nsentence|label\ngood|1\nbad|0\n'}, 2, []),
    "views of strings": ("sst2", {"train.parquet": parquet(sentence=pa.array(["good", "bad"]).cast(pa.string_view()), label=[0, 1])}, 2, []),
    "tabs called csv": ("sst2", {"train.csv": b'sentence\tlabel\n"good\tfilm"\t1\nbad\t0\n'}, 2, ["separated by '\\t'"]),
    "commas called tsv": ("sst2", {"train.tsv": b'sentence,label\n"good, film",1\nbad,0\n'}, 2, ["separated by ','"]),
    "one label with a blank": ("custom", {"train.csv": b"text,label\ngood,1\nbad,3\nfilm,1 \n"}, 3, []),
    "answer written as text": ("squad", {"train.csv": b"question,context,answers\nwas it?,good film,film\n"}, 1, []),
}  # fmt: skip


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("case", READ)
def test_it_is_read_and_no_row_is_lost(case, tmp_path, backbone, capsys):
    task, files, rows, words = READ[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "validation.jsonl").write_bytes(own("1", "3") if task == "custom" else GOOD[task])
    dm = module(task, backbone, tmp_path)
    batches = list(dm.train_dataloader())
    assert sorted(i for batch in batches for i in batch["index"].tolist()) == list(range(rows))
    err = capsys.readouterr().err
    assert all(word in err for word in words) and err.count("note: ") == bool(words)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("encoding", ["utf-16", "cp1252", "latin-1", "utf-8-sig"])
@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.json"])
def test_other_encodings_are_read_where_they_are_given(tmp_path, backbone, encoding, name):
    rows = [{"sentence": "caf\u00e9 \u00fcber", "label": 1}, {"sentence": "\u00e4", "label": 0}]
    sign = "\t" if name.endswith("tsv") else ","
    table = "".join(f"{sign.join(map(str, row))}\r\n" for row in [rows[0], *(row.values() for row in rows)])
    content = json.dumps(rows, ensure_ascii=False, indent=1) if name.endswith("json") else table
    (tmp_path / name).write_bytes(content.encode(encoding))
    (tmp_path / "validation.csv").write_text("sentence,label\ngood,1\n")
    dm = module("sst2", backbone, tmp_path, encoding=encoding)
    if encoding != "utf-16":
        dm.setup("fit")
        assert dm._split("train").rows.to_list() == rows
        return
    with pytest.raises(UserError, match=r"validation.csv.* not utf-16; it is UTF-8; leave --data.encoding out"):
        dm.setup("fit")


@pytest.mark.usefixtures("cache")
def test_quoted_tabs_are_text_and_quotes_elsewhere_stay(tmp_path, backbone):
    (tmp_path / "train.tsv").write_text('sentence\tlabel\n"good\tfilm"\t1\n"a ""bad"" one"\t0\n')
    (tmp_path / "validation.tsv").write_text('sentence\tlabel\n"good" film\t1\n"bad\t0\n')
    dm = module("sst2", backbone, tmp_path)
    dm.setup("fit")
    assert dm._split("train").rows["sentence"][:] == ["good\tfilm", 'a "bad" one']
    assert dm._split("validation").rows["sentence"][:] == ['"good" film', '"bad']


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("new.txt", b"text,stars\ngood,1\n", "a table by its first line, 'text,stars'; call it .csv"),
        ("new.txt", b"text\ngood\n", "a table by its first line, 'text'; call it .csv"),
        ("new.txt", b"id\tcomment\n1\tgood\n2\tbad\n", "a table by its first line, 'id comment'; call it .tsv"),
        ("new.txt", b"no;comment\n1;good\n2;bad\n", "a table by its first line, 'no;comment'; call it .csv"),
        ("new.txt", own("a", "b"), "is JSON by its first line"),
        ("new.csv", b"comment\ngood\n", "has no column 'text'"),
        ("new.xlsx", b"PK", "is no .parquet, .jsonl"),
        ("new.csv.zip", b"PK", "is packed (.zip); unpack it"),
        ("new.parquet.gz", b"PK", "is packed (.gz); unpack it"),
    ],
)
def test_predict_refuses_a_file_that_its_name_does_not_fit(tmp_path, backbone, name, content, words):
    """It read whole lines, header included, as texts."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"^data\.path: '.*new\.") as caught:
        module("custom", backbone, tmp_path / name, custom=Custom(labels=["a", "b"])).setup("predict")
    assert words in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_texts_with_commas_are_texts(tmp_path, backbone):
    (tmp_path / "new.txt").write_text("good, the film\nbad, bad film\nwas it, bad\n[good] film\n")
    dm = module("custom", backbone, tmp_path / "new.txt", custom=Custom(labels=["a", "b"]))
    assert len(dm.prediction_texts) == 4


@pytest.mark.usefixtures("cache")
def test_a_label_that_only_the_validation_has(tmp_path, backbone):
    (tmp_path / "train.jsonl").write_bytes(own("a", "b"))
    (tmp_path / "validation.jsonl").write_bytes(own("a", "c"))
    with pytest.raises(UserError, match=r"validation.jsonl' row 2: label 'c' is none of task 'custom'; valid: a, b$"):
        module("custom", backbone, tmp_path).setup("fit")


@pytest.mark.usefixtures("cache")
def test_numbers_are_names_where_names_are_numbers(tmp_path, backbone):
    """Stars 1 to 3: a 1 is the name, not the second class; a 0 is none of them."""
    (tmp_path / "train.jsonl").write_bytes(own(3, 1, 2))
    (tmp_path / "validation.jsonl").write_bytes(own(2, 1))
    dm = module("custom", backbone, tmp_path)
    assert dm.record.labels == ("1", "2", "3")
    dm.setup("fit")
    assert dm._split("train").rows["label"][:] == [2, 0, 1]
    (tmp_path / "validation.jsonl").write_bytes(own(0))
    with pytest.raises(UserError, match="row 1: label 0 is none"):
        module("custom", backbone, tmp_path).setup("fit")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_minus_one_is_a_label_in_files_of_ones_own(tmp_path, backbone, kind):
    (tmp_path / "train.jsonl").write_bytes(own(-1, 1, 0))
    (tmp_path / "validation.jsonl").write_bytes(own(-1))
    dm = module(f"custom-{kind}", backbone, tmp_path)
    dm.setup("fit")
    assert dm.record.labels == (("-1", "0", "1") if kind == "classification" else ())
    assert dm._split("train").rows["label"][:] == ([0, 2, 1] if kind == "classification" else [-1.0, 1.0, 0.0])


@pytest.mark.usefixtures("cache")
def test_a_folder_without_training_rows(tmp_path, backbone):
    (tmp_path / "test.jsonl").write_bytes(own("a"))
    with pytest.raises(UserError, match=r"has no file for 'train', and data\.custom\.labels names no classes"):
        module("custom", backbone, tmp_path)


@pytest.mark.usefixtures("cache")
def test_a_folder_without_splits(tmp_path, backbone):
    for name, line in (("mine.csv", "it holds mine.csv$"), ("label=a/0.csv", r"by value \(label=a\); write it as one")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"text\ngood\n")
        with pytest.raises(UserError, match=f"no file for train, validation or test; .*{line}"):
            module("custom", backbone, tmp_path)


@pytest.mark.usefixtures("cache")
def test_an_entity_longer_than_the_input_is_not_cut(tmp_path, backbone):
    """40 words in inputs of 12 tokens: every word has its tag, in one input or the other."""
    words, tags = ["good"] * 40, ["B-PER", *["I-PER"] * 39]
    (tmp_path / "train.jsonl").write_bytes(jsonl({"tokens": words, "ner_tags": tags}))
    (tmp_path / "validation.jsonl").write_bytes(GOOD["conll2003"])
    [batch] = module("conll2003", backbone, tmp_path, max_length=12).train_dataloader()
    assert sorted(batch["labels"][batch["labels"] >= 0].tolist()) == [1, *[2] * 39] and len(batch["labels"]) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, "has no data of its own"),
        ({"path": "notes.txt"}, "'notes.txt': no such folder"),
        ({"custom": Custom(text=["a", "b", "c"])}, "data.custom.text: a, b, c: kind classification has 1 to 2"),
        ({"custom": Custom(kind="span_qa", text=["a"])}, "data.custom.text: a: kind span_qa has 2 to 2"),
        ({"custom": Custom(labels=["a", "a"])}, "data.custom.labels: a, a: give two or more"),
        ({"stride": -1}, "data.stride: -1 is too small"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("cache")
def test_wrong_settings_of_the_own_task(tmp_path, backbone, options, words):
    (tmp_path / "train.jsonl").write_bytes(own("a", "b"))
    with pytest.raises(UserError, match="data") as caught:
        DataModule(**{"task": "custom", "backbone": backbone, "path": str(tmp_path), **options}).setup("fit")
    assert words in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_too_few_rows_to_split(tmp_path, backbone):
    (tmp_path / "mine.jsonl").write_bytes(own("a", "b"))
    with pytest.raises(UserError, match="has 2 rows; to split them give 10 or more"):
        module("custom", backbone, tmp_path / "mine.jsonl").setup("fit")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("content", "words"), [(b"broken", "no readable dataset"), (POINTER, "arrow' is a Git LFS")])
def test_a_broken_saved_dataset(content, words, tmp_path, backbone):
    rows = {"text": ["a", "b"], "label": ["x", "y"]}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows)).save_to_disk(str(tmp_path / "set"))
    next((tmp_path / "set" / "train").glob("*.arrow")).write_bytes(content)
    with pytest.raises(UserError, match=words):
        module("custom", backbone, tmp_path / "set").setup("fit")
