"""Rows that are not usable are one line with file and row, in every kind of task; the rest of the rows is kept."""

import json

import pytest
from contents import jsonl, ner, own, qa, sst2

from lit_compress.data.checks import FEWEST_TO_SPLIT, KEPT
from lit_compress.data.custom import custom_task
from lit_compress.data.readers import Place
from lit_compress.data.sources import load_split_files
from lit_compress.tasks.records import Custom, get_task
from lit_compress.utils.errors import UserError

PAIR = b"sentence1,sentence2,label\n"

# name -> task, name of the training file, its bytes, what the line says besides the file
REFUSED = {
    "column missing in a row": ("sst2", "train.jsonl", sst2(1) + b'{"label": 1}\n', ["row 2", "no 'sentence'"]),
    "null text": ("sst2", "train.jsonl", sst2(1) + b'{"sentence": null, "label": 1}', ["row 2", "null"]),
    "empty field": ("sst2", "train.csv", b"sentence,label\na,1\n,1\n", ["row 2", "null"]),
    "number for text": ("sst2", "train.jsonl", b'{"sentence": 5, "label": 1}', ["row 1", "5 (int)"]),
    "half a character": ("sst2", "train.jsonl", sst2(1) + sst2(1, text="a\ud800"), ["row 2", "character at 1"]),
    # labels
    "no label column": ("sst2", "train.csv", b"sentence\na\n", ["no column 'label'"]),
    "misspelt label column": ("sst2", "train.csv", b"sentence,labels\na,1\n", ["no column 'label' (did you mean 'labels'?)", "only predict"]),
    "null label": ("sst2", "train.jsonl", sst2(1, None), ["row 2", "label is null"]),
    "NaN label": ("sst2", "train.jsonl", sst2(1, float("nan")), ["row 2", "null"]),
    "empty label": ("sst2", "train.csv", b"sentence,label\na,1\nb,\n", ["row 2", "null"]),
    "label out of range": ("sst2", "train.jsonl", sst2(0, 2), ["row 2", "label 2", "negative, positive", "0..1"]),
    "misspelt label": ("sst2", "train.jsonl", sst2(0, "positiv"), ["row 2", "did you mean 'positive'?"]),
    "fraction for a class": ("sst2", "train.jsonl", sst2(0, 0.5), ["row 2", "0.5"]),
    "one row unlabelled": ("sst2", "train.jsonl", sst2(1, -1), ["row 2", "-1"]),
    "one row of numbers unlabelled": ("stsb", "train.csv", PAIR + b"a,b,2\na,b,-1\n", ["row 2", "label is -1, which is none"]),
    "all rows unlabelled": ("sst2", "train.jsonl", sst2(-1, -1), ["no labels", "only predict"]),
    "labels begin late": ("sst2", "train.jsonl", sst2(-1, 1), ["row 2", "row 1 has none"]),
    "score is a word": ("stsb", "train.csv", PAIR + b"a,b,2\na,b,high\n", ["row 2", "'high'", "finite"]),
    "score is a truth value": ("stsb", "train.jsonl", jsonl({"sentence1": "a", "sentence2": "b", "label": True}), ["row 1", "True", "finite"]),
    "score beyond float32": ("stsb", "train.csv", PAIR + b"a,b,2\na,b,1e39\n", ["row 2", "'1e39'", "finite"]),
    "score of 400 digits": ("stsb", "train.jsonl", jsonl({"sentence1": "a", "sentence2": "b", "label": 10**400}), ["row 1", "finite"]),
    # tagging
    "fewer tags than words": ("conll2003", "train.jsonl", ner(["a", "b"], [0]), ["row 2", "2 words", "1 labels"]),
    "unknown tag": ("conll2003", "train.jsonl", ner(["a", "b"], ["O", "B-PRE"]), ["row 2 word 2", "did you mean 'B-PER'?"]),
    "tag out of range": ("conll2003", "train.jsonl", ner(["a"], [9]), ["row 2 word 1", "label 9"]),
    "null tag": ("conll2003", "train.jsonl", ner(["a"], [None]), ["row 2 word 1", "null"]),
    "no words": ("conll2003", "train.jsonl", ner([], []), ["row 2", "no words"]),
    "empty word": ("conll2003", "train.jsonl", ner(["a", ""], [0, 0]), ["row 2", "word 2", "give text"]),
    # answers
    "answer not in the context": ("squad", "train.jsonl", qa("bad", 0), ["row 2", "not in the context"]),
    "offset one off": ("squad", "train.jsonl", qa("film", 4), ["row 2", "not at character 4", "nearest: 5"]),
    "offset is a word": ("squad", "train.jsonl", qa("film", "five"), ["row 2", "no whole number"]),
    "empty answer": ("squad", "train.jsonl", qa("", 0), ["row 2", "give text"]),
    "question without answer": ("squad", "train.jsonl", qa("", 0, answers={"text": [], "answer_start": []}), ["row 2", "no answer", "squad_v2", "--data.null_threshold 0"]),
    "more offsets than answers": ("squad_v2", "train.jsonl", qa("", 0, answers={"text": ["film"], "answer_start": [5, 5]}), ["row 2", "of one length"]),
    "ids twice": ("squad", "train.jsonl", qa("film", 5, id="1"), ["row 2", "id '1'", "row 1"]),
    "a number as id twice": ("squad", "train.jsonl", qa("film", 5, id=1), ["row 2", "id '1'", "row 1"]),
    # the user's own task
    "fractions for classes": ("classification", "train.csv", b"text,label\ngood,1\nbad,2.5\n", ["row 2", "fraction", "kind regression", "data.custom.labels"]),
    "labels of several types": ("classification", "train.jsonl", own("a", "b", 1), ["row 3", "int", "str"]),
    "one label only": ("classification", "train.jsonl", own("a", "a"), ["all labels are 'a'"]),
    "a header alone": ("classification", "train.csv", b"text,label\n", ["has a header (text, label) and no rows"]),
    "own tags are a number": ("tagging", "train.jsonl", jsonl({"tokens": ["a"], "tags": 3}), ["row 1", "give a list"]),
    "own label is the text of a list": ("classification", "train.csv", b"text,label\na,['joy']\nb,['fear']\n", ["row 1", "a list; kind multi_label reads lists"]),
    "own label column is missing": ("classification", "train.csv", b"text,stars\na,1\nb,0\n", ["'label'", "text, stars"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case, tmp_path):
    task, name, content, words = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "validation.jsonl").write_bytes(content)
    place = Place(str(tmp_path))
    with pytest.raises(UserError) as caught:
        record = custom_task(Custom(task), place) if task in ("classification", "tagging") else get_task(task)
        load_split_files(record, place, ["train"])
    line = str(caught.value)
    assert len(line) < 500 and all(word in line for word in [str(tmp_path / name), *words]), line
    assert not list((tmp_path / "cache").glob(".rows*"))


@pytest.mark.parametrize("content", [sst2(-1, -1), b'{"sentence": "a"}\n'], ids=["minus one", "no column"])
def test_rows_without_labels_are_for_predict_only(tmp_path, content):
    (tmp_path / "test.jsonl").write_bytes(content)
    rows = load_split_files(get_task("sst2"), Place(str(tmp_path)), ["test"], labelled=False)["test"]
    assert rows.column_names == ["sentence", KEPT]
    with pytest.raises(UserError, match="only predict"):
        load_split_files(get_task("sst2"), Place(str(tmp_path)), ["test"])


def test_ids_and_labels_of_the_file_are_kept_for_predictions(tmp_path):
    (tmp_path / "new.csv").write_text("id,sentence,label\nx1,good,positive\nx2,bad,0\n")
    rows = load_split_files(get_task("sst2"), Place(str(tmp_path / "new.csv")), ["all"], labelled=False)["all"]
    kept = [json.loads(row) for row in rows["__kept__"]]
    assert kept == [{"id": "x1", "given": "positive"}, {"id": "x2", "given": "negative"}]
    (tmp_path / "new.jsonl").write_bytes(
        jsonl({"sentence": "good", "id": float("nan")}, {"sentence": "bad", "id": 2.0})
    )
    rows = load_split_files(get_task("sst2"), Place(str(tmp_path / "new.jsonl")), ["all"], labelled=False)["all"]
    assert [json.loads(row) for row in rows["__kept__"]] == [{}, {"id": 2.0}]  # no NaN, which is no JSON


def test_too_few_rows_to_split(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(sst2(0, 1))
    with pytest.raises(UserError, match=f"has 2 rows; to split them give {FEWEST_TO_SPLIT} or more"):
        load_split_files(get_task("sst2"), Place(str(tmp_path / "mine.jsonl")))
