"""Every format reads the same rows; every mistake in a file is one line that names it."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_compress.data.sources import has_split, load_split_files
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

SST2, STSB, MNLI = get_task("sst2"), get_task("stsb"), get_task("mnli")
ROWS = [('a, "b"', 1), ("ünï", 0), ("c", 1)]


def _write(file, rows=ROWS, columns=("sentence", "label")):
    """Write rows in the format of the file's suffix."""
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), file)
    elif file.suffix in (".jsonl", ".json"):
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        separator, quoted = (
            (",", lambda text: '"' + text.replace('"', '""') + '"') if file.suffix == ".csv" else ("\t", str)
        )
        lines = [
            separator.join(columns),
            *(separator.join(quoted(str(field)) for field in row) for row in rows),
        ]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _fails(task, path, splits=("train",), labelled=True) -> str:
    with pytest.raises(UserError) as caught:
        load_split_files(task, str(path), splits, labelled)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("data.")
    return message


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv"])
def test_files_packed_by_gzip_have_the_same_rows(tmp_path, suffix):
    file = _write(tmp_path / f"train.{suffix}")
    plain = load_split_files(SST2, str(tmp_path), ["train"])["train"]
    (tmp_path / f"train.{suffix}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert "both could be 'train'; leave one" in _fails(SST2, tmp_path)
    file.unlink()
    assert load_split_files(SST2, str(tmp_path), ["train"])["train"].to_dict() == plain.to_dict()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv", "tsv"])
def test_every_format_reads_the_same_rows(tmp_path, suffix):
    _write(tmp_path / f"train.{suffix}")
    _write(tmp_path / f"dev.{suffix}", ROWS[:1])
    loaded = load_split_files(SST2, str(tmp_path))
    assert loaded["train"].to_dict() == {"sentence": [text for text, _ in ROWS], "label": [1, 0, 1]}
    assert len(loaded["validation"]) == 1


def test_only_the_columns_of_the_task_are_kept(tmp_path):
    _write(tmp_path / "train.csv", [("7", "a", "0")], ("idx", "sentence", "label"))
    assert load_split_files(SST2, str(tmp_path), ["train"])["train"].column_names == ["sentence", "label"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_labels_may_be_names(tmp_path, suffix):
    _write(tmp_path / f"train.{suffix}", [("a", "positive"), ("b", "negative")])
    assert load_split_files(SST2, str(tmp_path), ["train"])["train"]["label"][:] == [1, 0]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_regression_labels_are_numbers(tmp_path, suffix):
    _write(tmp_path / f"train.{suffix}", [("a", "b", 2.5), ("c", "d", 5.0)], ("sentence1", "sentence2", "label"))
    assert load_split_files(STSB, str(tmp_path), ["train"])["train"]["label"][:] == [2.5, 5.0]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "train.csv").write_bytes(b'\xef\xbb\xbfsentence,label\r\n"a\r\nb",1\r\n\r\n')
    assert load_split_files(SST2, str(tmp_path), ["train"])["train"].to_dict() == {
        "sentence": ["a\r\nb"],
        "label": [1],
    }


def test_second_validation_split_may_be_missing(tmp_path):
    columns = ("premise", "hypothesis", "label")
    _write(tmp_path / "train.csv", [("a", "b", 2)], columns)
    _write(tmp_path / "validation_matched.csv", [("a", "b", 2)], columns)
    assert list(load_split_files(MNLI, str(tmp_path))) == ["train", "validation_matched"]
    _write(tmp_path / "validation_mismatched.csv", [("a", "b", 0)], columns)
    assert list(load_split_files(MNLI, str(tmp_path))) == [
        "train",
        "validation_matched",
        "validation_mismatched",
    ]


@pytest.mark.parametrize("rows", [[("a", -1), ("b", -1)], None], ids=["minus one", "no column"])
def test_rows_without_labels_are_for_predict_only(tmp_path, rows):
    file = tmp_path / "test.jsonl"
    _write(file, rows) if rows else _write(file, [("a",)], ("sentence",))
    assert load_split_files(SST2, str(tmp_path), ["test"], labelled=False)["test"].column_names == ["sentence"]
    message = _fails(SST2, tmp_path, ["test"])
    assert "test.jsonl" in message and "only predict" in message


def test_a_mistyped_label_column_is_named(tmp_path):
    _write(tmp_path / "train.csv", [("a", 1)], ("sentence", "labels"))
    assert "no column 'label' (did you mean 'labels'?)" in _fails(SST2, tmp_path)


# name of the file, its bytes, what the message says besides the file's name
BROKEN = {
    "empty": ("train.csv", b"", ["0 bytes"]),
    "empty parquet": ("train.parquet", b"", ["0 bytes"]),
    "no rows": ("train.csv", b"sentence,label\n", ["no rows"]),
    "no rows jsonl": ("train.jsonl", b"\n", ["no rows"]),
    "not parquet": ("train.parquet", b"PAR1 but not really PAR1", ["no readable parquet"]),
    "column": ("train.csv", b"sentense,label\na,1\n", ["'sentence'", "did you mean 'sentense'?"]),
    "column jsonl": ("train.jsonl", b'{"sentence": "a", "label": 1}\n{"text": "b"}', ["row 2", "'sentence'"]),
    "fields": ("train.csv", b"sentence,label\na,1\nb,c,1\n", ["row 2", "3 fields", "sentence, label"]),
    "open quote": ("train.csv", b'sentence,label\na,1\n"b,1\nc,0\n', ["row 2", "unexpected end"]),
    "null text": (
        "train.jsonl",
        b'{"sentence": "a", "label": 1}\n{"sentence": null, "label": 1}',
        ["row 2", "null"],
    ),
    "empty text": ("train.csv", b"sentence,label\na,1\n,1\n", ["row 2", "'sentence' is null"]),
    "number as text": ("train.jsonl", b'{"sentence": 5, "label": 1}', ["row 1", "5 (int)"]),
    "null label": ("train.jsonl", b'{"sentence": "a", "label": null}', ["row 1", "label is null"]),
    "nan label": ("train.jsonl", b'{"sentence": "a", "label": NaN}', ["row 1", "label is null"]),
    "empty label": ("train.csv", b"sentence,label\na,1\nb,\n", ["row 2", "label is null"]),
    "label name": (
        "train.csv",
        b"sentence,label\na,positiv\n",
        ["row 1", "'positiv'", "did you mean 'positive'?"],
    ),
    "label number": (
        "train.csv",
        b"sentence,label\na,1\nb,2\n",
        ["row 2", "'2'", "negative, positive", "0..1"],
    ),
    "label float": ("train.jsonl", b'{"sentence": "a", "label": 0.5}', ["row 1", "0.5"]),
    "label bool": ("train.jsonl", b'{"sentence": "a", "label": true}', ["row 1", "True"]),
    "label list": ("train.jsonl", b'{"sentence": "a", "label": [1]}', ["row 1", "[1]"]),
    "one unlabelled": ("train.csv", b"sentence,label\na,1\nb,-1\n", ["row 2", "-1"]),
    "latin-1": ("train.csv", b"sentence,label\na,1\ncaf\xe9,1\n", ["line 3", "byte 22", "0xe9", "UTF-8"]),
    "utf-16": ("train.tsv", "sentence\tlabel\n".encode("utf-16"), ["byte 0", "UTF-8"]),
    "json": ("train.jsonl", b'{"sentence": "a", "label": 1}\n{"sentence": \n', ["row 2", "malformed JSON"]),
    "json array of arrays": (
        "train.json",
        b'[["a", 1]]',
        ["row 1", "list", "one object per line"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line(tmp_path, case):
    name, content, parts = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    message = _fails(SST2, tmp_path)
    assert all(part in message for part in [str(tmp_path / name), *parts]), message


@pytest.mark.parametrize("label", [b"nan", b"inf", b"high", b""])
def test_a_regression_label_must_be_finite(tmp_path, label):
    (tmp_path / "train.tsv").write_bytes(b"sentence1\tsentence2\tlabel\na\tb\t1\nc\td\t" + label + b"\n")
    assert "row 2" in _fails(STSB, tmp_path)


def test_a_truncated_parquet_file(tmp_path):
    file = _write(tmp_path / "train.parquet")
    file.write_bytes(file.read_bytes()[:-40])
    assert "no readable parquet" in _fails(SST2, tmp_path)


def test_parquet_with_a_null_text(tmp_path):
    _write(tmp_path / "train.parquet", [("a", 1), (None, 0)])
    assert "train.parquet' row 2: 'sentence' is null" in _fails(SST2, tmp_path)


def test_parquet_with_a_column_of_numbers(tmp_path):
    _write(tmp_path / "train.parquet", [(1, 1), (2, 0)])
    assert "column 'sentence' is of type int64" in _fails(SST2, tmp_path)


def test_parquet_with_text_that_is_not_utf8(tmp_path):
    broken = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"sentence": broken, "label": [0, 1]}), tmp_path / "train.parquet")
    assert "UTF8" in _fails(SST2, tmp_path)


def test_a_missing_folder(tmp_path):
    assert f"'{tmp_path}/none': no such folder or file" in _fails(SST2, tmp_path / "none")


@pytest.mark.parametrize("name", ["mine.csv", "mine.CSV", "mine.json"])
def test_a_single_file_of_a_shipped_task(tmp_path, name):
    """It is split for fit, read whole for predict, and for validate and test where that is said."""
    rows = [(f"text {i}", i % 2) for i in range(20)]
    file = (
        _write(tmp_path / name, rows)
        if name != "mine.CSV"
        else _write(tmp_path / "a.csv", rows).rename(tmp_path / name)
    )
    loaded = load_split_files(SST2, str(file), ["train", "validation", "test"], seed=1)
    assert [len(split) for split in loaded.values()] == [16, 2, 2]
    assert sorted(text for split in loaded.values() for text in split["sentence"]) == sorted(text for text, _ in rows)
    assert has_split(SST2, str(file), "all") and not has_split(SST2, str(file), "extra")
    (every,) = load_split_files(SST2, str(file), ["all"]).values()
    assert every["sentence"][:] == [text for text, _ in rows]
    for split in ("validation", "test"):
        assert len(load_split_files(SST2, str(file), [split], whole=True)[split]) == 20
    assert "has 3 rows; to split them give 10 or more" in _fails(SST2, _write(tmp_path / "few.csv"))


def test_a_single_file_of_a_task_with_two_validation_splits(tmp_path):
    rows = [("a", "b", i % 3) for i in range(20)]
    file = str(_write(tmp_path / "mine.csv", rows, ("premise", "hypothesis", "label")))
    assert {name: len(split) for name, split in load_split_files(MNLI, file).items()} == {
        "train": 16, "validation_matched": 2
    }  # fmt: skip
    assert list(load_split_files(MNLI, file, ["validation_matched", "validation_mismatched"], whole=True)) == [
        "validation_matched"
    ]


def test_an_encoding_is_for_files(tmp_path):
    with pytest.raises(UserError, match=r"data\.encoding: cp1252 is for files; give --data.path, or leave it out"):
        load_split_files(SST2, None, encoding="cp1252")
    _write(tmp_path / "train.csv")
    with pytest.raises(UserError, match=r"data\.encoding: 'cp125' is no text encoding; did you mean 'cp1252'"):
        load_split_files(SST2, str(tmp_path), ["train"], encoding="cp125")


def test_the_same_bytes_in_two_encodings_are_two_contents(tmp_path):
    """One is not read from the cache of the other."""
    (tmp_path / "train.csv").write_bytes("sentence,label\n\u0444\u0438,1\n".encode("cp1251"))
    texts = [
        load_split_files(SST2, str(tmp_path), ["train"], encoding=e)["train"]["sentence"][0]
        for e in ("cp1251", "cp1252")
    ]
    assert texts == ["\u0444\u0438", "\u00f4\u00e8"]


def test_a_missing_file_says_what_was_looked_for(tmp_path):
    assert "(train)(.parquet|.jsonl|.json|.csv|.tsv|.txt), the folder is empty" in _fails(SST2, tmp_path)
    _write(tmp_path / "trian.csv")
    assert "did you mean 'trian.csv'?" in _fails(SST2, tmp_path)


def test_two_files_for_one_split(tmp_path):
    _write(tmp_path / "train.csv")
    _write(tmp_path / "train.tsv")
    assert "train.csv and train.tsv" in _fails(SST2, tmp_path)


def test_no_hub_is_one_line(hub):
    hub.close()
    with pytest.raises(UserError) as caught:
        load_split_files(SST2, None)
    message = str(caught.value)
    assert "\n" not in message and "'nyu-mll/glue'" in message and "--data.path" in message


def test_hub_rows_are_checked_like_files(hub):
    rows, hidden = '{"sentence": "a", "label": 0}\n{"sentence": "b", "label": 1}\n', '{"sentence": "a", "label": -1}\n'
    files = {"sst2/train.jsonl": rows, "sst2/validation.jsonl": rows, "sst2/test.jsonl": hidden}
    hub.add("nyu-mll/glue", {name: text.encode() for name, text in files.items()}, kind="datasets")
    assert load_split_files(SST2, None)["train"].to_dict() == {"sentence": ["a", "b"], "label": [0, 1]}
    assert has_split(SST2, None, "test") and not has_split(SST2, None, "extra")
    with pytest.raises(UserError, match=r"test.jsonl' has no labels"):
        load_split_files(SST2, None, ["test"])


def test_embedded_rows():
    loaded = load_split_files(get_task("docstrings"), None, ["validation", "test"])
    assert loaded["test"].column_names == ["text", "label"]


@pytest.mark.parametrize("name", ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"])
def test_real_files(shared, name):
    task = get_task(name)
    loaded = load_split_files(task, str(shared / "data" / "glue" / name))
    assert list(loaded) == ["train", *task.validation]
