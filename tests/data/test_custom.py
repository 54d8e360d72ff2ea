"""The user's own files: columns by name, labels found, one file split."""

import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_compress.data.custom import custom_task
from lit_compress.data.datamodule import DataModule
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files
from lit_compress.tasks.classification import class_number
from lit_compress.tasks.records import Custom, get_task
from lit_compress.utils.errors import UserError


def _write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _csv(folder, split, *labels):
    """Write a file of texts that are all alike, with labels."""
    lines = ["text,label", *(f"good,{label}" for label in labels)]
    (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def _made(path, **custom):
    return custom_task(Custom(**custom), Place(str(path)))


def _labels(task, path, split="train"):
    """Return the numbers of the labels of a split."""
    return load_split_files(task, Place(str(path)), [split])[split][task.label][:]


REVIEWS = [{"review": f"film {i} good", "other": "bad", "stars": ["low", "high", "none"][i % 3]} for i in range(40)]
OWN = {"text": ["review"], "label": "stars"}


def test_columns_by_name_and_labels_in_order(tmp_path):
    task = _made(_write(tmp_path / "a.jsonl", REVIEWS), text=["review", "other"], label="stars")
    assert task.labels == ("high", "low", "none") and task.metrics == ("accuracy", "macro_f1")
    rows = load_split_files(task, Place(str(tmp_path / "a.jsonl")))["train"]
    assert rows.column_names == ["review", "other", "stars"]
    for row in rows:
        assert task.labels[row["stars"]] == REVIEWS[int(row["review"].split()[1])]["stars"]


def test_the_same_file_read_with_other_settings(tmp_path):
    """What was read before is in the cache: other class numbers, and answers that are now needed."""
    file = _write(tmp_path / "a.jsonl", REVIEWS)
    for labels in (["high", "low", "none"], ["none", "low", "high"]):
        task = _made(file, **OWN, labels=labels)
        for row in load_split_files(task, Place(str(file)))["train"]:
            assert labels[row["stars"]] == REVIEWS[int(row["review"].split()[1])]["stars"]
    rows = [{"question": "a", "context": "b c", "answers": "c" if i % 2 else ""} for i in range(10)]
    file = _write(tmp_path / "qa.jsonl", rows)
    task = _made(file, kind="span_qa")
    load_split_files(replace(task, spans=replace(task.spans, null_threshold=0.0)), Place(str(file)))
    with pytest.raises(UserError, match="row 1: the question has no answer"):
        load_split_files(task, Place(str(file)))


def test_one_file_is_split_in_one_way_for_all_seeds(tmp_path, backbone):
    file = _write(tmp_path / "a.jsonl", REVIEWS)

    def texts(**seeds):
        dm = DataModule("custom", backbone, str(file), custom=Custom(**OWN), **seeds)
        dm.setup("fit")
        dm.setup("test")
        return {name: set(dm._split(name).rows["review"]) for name in ("train", "validation", "test")}

    parts = texts(seed=1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 32, "validation": 4, "test": 4}
    assert set().union(*parts.values()) == {row["review"] for row in REVIEWS}
    assert texts() == texts(seed=2) == parts != texts(split_seed=1)


def test_a_test_file_is_left_alone(tmp_path):
    _write(tmp_path / "train.jsonl", REVIEWS)
    _write(tmp_path / "test.jsonl", REVIEWS[:3])
    rows = load_split_files(_made(tmp_path, **OWN), Place(str(tmp_path)), ["train", "validation", "test"])
    assert [len(split) for split in rows.values()] == [36, 4, 3]


@pytest.mark.parametrize("names", [["pos", "neg"], [" pos", "neg "]], ids=["plain", "with blanks"])
@pytest.mark.parametrize("single", [True, False], ids=["one set", "with splits"])
def test_a_saved_dataset_brings_the_names_of_its_classes(tmp_path, single, names):
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=names))
    rows = datasets.Dataset.from_dict({"text": ["good", "bad"] * 20, "label": [0, 1] * 20}, features=features)
    (rows if single else datasets.DatasetDict(train=rows, validation=rows)).save_to_disk(str(tmp_path / "set"))
    task = _made(tmp_path / "set")
    assert task.labels == ("pos", "neg")  # their order, not the alphabet's
    train = load_split_files(task, Place(str(tmp_path / "set")))["train"]
    assert len(train) == (32 if single else 40)
    assert all((row["text"] == "good") == (row["label"] == 0) for row in train)


def test_tags_without_entities_are_scored_by_word(tmp_path):
    file = _write(tmp_path / "a.jsonl", [{"words": "the film", "pos": "DET NOUN"}] * 10)
    task = _made(file, kind="tagging", text=["words"], label="pos")
    assert task.labels == ("DET", "NOUN") and task.metrics == ("word_accuracy",)
    rows = load_split_files(task, Place(str(file)))["train"]
    assert rows[0] == {"words": ["the", "film"], "pos": [0, 1]}


@pytest.mark.parametrize(
    ("custom", "path", "words"),
    [
        ({}, None, "has no data of its own"),
        ({"text": ["a", "b", "c"]}, "", "data.custom.text: a, b, c: kind classification has 1 to 2"),
        ({"kind": "span_qa", "text": ["a"]}, "", "data.custom.text: a: kind span_qa has 2 to 2"),
        ({"labels": ["a", "a"]}, "", "data.custom.labels: a, a: give two or more"),
        ({"text": ["a", "b"], "label": "b"}, "", "data.custom.label: 'b' is a column of texts"),
        ({"kind": "regression", "label": "text"}, "", "data.custom.label: 'text' is a column of texts"),
        ({"kind": "language_modelling", "label": "label"}, "", "kind language_modelling has no labels"),
        ({"text": ["text", "text"]}, "", "text: text, text: kind classification has 1 to 2 columns, each once"),
        ({}, "mine", r"has no file for 'train', and data\.custom\.labels names no classes"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_line(tmp_path, custom, path, words):
    if path is not None:
        _csv(tmp_path, path or "train", "a", "b")
    with pytest.raises(UserError, match=words):
        custom_task(Custom(**custom), Place(None if path is None else str(tmp_path)))


# ---------------------------------------------------------------- labels


# labels of the training rows, of other rows, settings -> the classes, the numbers of both
READ = {
    "blanks around them": (["yes", "yes ", " no", "\tyes"], ["no "], {}, ["no", "yes"], [1, 1, 0, 1], [0]),
    "blanks in given ones": (["yes ", "no"], ["no "], {"labels": [" yes", "no"]}, ["yes", "no"], [0, 1], [1]),
    "names that are fractions": (["1.0", "2.5"], ["2.5"], {"labels": ["1.0", "2.5"]}, ["1.0", "2.5"], [0, 1], [1]),
    # pandas writes integers so if one of the rows had none
    "whole numbers with a point": (["1.0", "3.0", "1.0"], ["3", "1.0"], {}, ["1", "3"], [0, 1, 0], [1, 0]),
    "numbers by value": (["-1", "10", "9"], ["-1"], {}, ["-1", "9", "10"], [0, 2, 1], [0]),  # -1 is a label
    "numbers of given classes": (["0", "1"], ["b", "0"], {"labels": ["b", "a"]}, ["b", "a"], [0, 1], [0, 0]),
    "numbers that are said to be": (["0"], ["b"], {"labels": ["b", "a"], "numbered": True}, ["b", "a"], [0], [0]),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_labels_are_read(tmp_path, case):
    train, other, settings, labels, numbers, others = READ[case]
    _csv(tmp_path, "train", *train)
    _csv(tmp_path, "validation", *other)
    task = _made(tmp_path, **settings)
    assert list(task.labels) == labels
    assert _labels(task, tmp_path) == numbers and _labels(task, tmp_path, "validation") == others


@pytest.mark.parametrize(("train", "other"), [([3, 1, 2], 0), (["a", "b"], "c")])
def test_a_label_that_only_another_file_has_is_one_line(tmp_path, train, other):
    """Stars 1 to 3: a 1 is the name, not the second class; a 0 is none of them."""
    _csv(tmp_path, "train", *train)
    _csv(tmp_path, "validation", other)
    task = _made(tmp_path)
    with pytest.raises(UserError, match=rf"validation.csv' row 1: label '{other}' is none of task 'custom'; valid: "):
        _labels(task, tmp_path, "validation")


def test_fractions_in_a_table_are_no_classes(tmp_path):
    pq.write_table(pa.table({"text": ["good"] * 4, "label": [1.0, 2.0, 3.75, 3.25]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"row 3: label .*3\.75.* fraction.*kind regression.*data\.custom\.labels"):
        _made(tmp_path)


def test_numbers_are_no_classes_where_the_training_rows_have_names(tmp_path):
    """Nobody has said that 0 is "good", which is the first by the alphabet only."""
    _csv(tmp_path, "train", "poor", "good", "good")
    _csv(tmp_path, "test", "0", "1")
    task = _made(tmp_path)
    assert not task.numbered
    for made in (task, _made(tmp_path, labels=["good", "poor"], numbered=False)):  # as a run stores it
        with pytest.raises(UserError, match=r"test.csv' row 1: label '0' is none of .*good, poor.*custom\.numbered"):
            _labels(made, tmp_path, "test")


def test_numbers_are_no_classes_whose_names_have_numbers(tmp_path):
    """1 is the first of "1 star" and "2 stars" by its name, and the second by its place."""
    names = ["1 star", "2 stars"]
    for split in ("train", "validation"):
        _csv(tmp_path, split, "1", "0")
    with pytest.raises(UserError, match=r"row 1: label '1' is none of .*1 star, 2 stars.*custom\.numbered true"):
        _labels(_made(tmp_path, labels=names), tmp_path)
    assert _labels(_made(tmp_path, labels=names, numbered=True), tmp_path) == [1, 0]


def test_numbers_are_classes_where_a_table_says_which(tmp_path):
    info = {"info": {"features": {"label": {"names": ["poor", "good"], "_type": "ClassLabel"}}}}
    table = pa.table({"text": ["good"] * 3, "label": [0, 1, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "train.parquet")
    _csv(tmp_path, "validation", "1", "poor")
    assert _labels(_made(tmp_path), tmp_path, "validation") == [1, 0]


def test_numbers_of_the_shipped_tasks_are_the_hubs():
    assert class_number(get_task("sst2"), "", "1") == class_number(get_task("sst2"), "", 1.0) == 1
    assert class_number(get_task("sst2"), "", "1.0") == class_number(get_task("sst2"), "", "positive ") == 1
