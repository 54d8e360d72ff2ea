"""JSON in all the forms that people keep rows in: read alike, or one line."""

import json

import pytest

from lit_compress.data.json_rows import json_rows
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

ROWS = [{"sentence": "good", "label": 1}, {"sentence": "bad\n", "label": 0}]
FORMS = {
    "lines": "\n".join(map(json.dumps, ROWS)),
    "blank lines": "\n\n" + "\n\n".join(map(json.dumps, ROWS)) + "\n\n",
    "a list": json.dumps(ROWS),
    "a list on many lines": json.dumps(ROWS, indent=2),
    "objects on many lines": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "a list in an object": json.dumps({"version": "1.1", "data": ROWS, "tags": ["a"]}),
    "a list in an object on many lines": json.dumps({"rows": ROWS}, indent=1),
    "columns": json.dumps({"sentence": ["good", "bad\n"], "label": [1, 0]}),
    "columns by row": json.dumps({"sentence": {"0": "good", "1": "bad\n"}, "label": {"0": 1, "1": 0}}, indent=1),
}


def rows(text, task="sst2"):
    return list(json_rows(get_task(task), "it", iter(text.splitlines(keepends=True))))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_rows(form):
    assert rows(FORMS[form]) == ROWS


def test_one_row_is_a_row():
    assert rows(json.dumps(ROWS[0])) == rows(json.dumps(ROWS[0], indent=1)) == rows(json.dumps(ROWS[:1])) == ROWS[:1]
    words = {"tokens": ["a", "b"], "ner_tags": [0, 0]}
    assert rows(json.dumps(words), "conll2003") == [words]
    columns = {"tokens": [["a"], ["b", "c"]], "ner_tags": [[0], [0, 0]]}
    assert rows(json.dumps(columns), "conll2003")[1] == {"tokens": ["b", "c"], "ner_tags": [0, 0]}


def test_nothing_is_no_row():
    assert rows("") == rows("\n \n") == rows("[]") == []


def squad(**answer):
    asked = [{"id": "q1", "question": "was it?", **answer}, {"question": "and?"}]
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "good film", "qas": asked}]}]}


@pytest.mark.parametrize("indent", [None, 1])
def test_nested_squad(indent):
    answers = [{"text": "film", "answer_start": 5}, {"text": "good", "answer_start": 0}]
    first, second = rows(json.dumps(squad(answers=answers, is_impossible=False), indent=indent), "squad")
    assert first == {"id": "q1", "question": "was it?", "context": "good film",
                     "answers": {"text": ["film", "good"], "answer_start": [5, 0]}}  # fmt: skip
    assert second == {"question": "and?", "context": "good film"}
    (first, _) = rows(json.dumps(squad(answers=[], is_impossible=True)), "squad_v2")
    assert first["answers"] == {"text": [], "answer_start": []}


@pytest.mark.parametrize(
    ("text", "task", "words"),
    [
        ("[1, 2]", "sst2", "it row 1: a JSON int; give one object per line, or a list of them"),
        ('["a", 1]\n["b", 0]', "sst2", "it row 1: a JSON list; give one object per line"),
        ("5", "sst2", "it row 1: a JSON int"),
        ('{"sentence": "a"}\n{"sentence": \n', "sst2", "it row 2: malformed JSON: Expecting value"),
        ('[{"sentence": "a"},\n {"sentence": b}]', "sst2", "malformed JSON: Expecting value (line 2, column 15)"),
        ('{"train": [{"a": 1}], "test": [{"a": 1}]}', "sst2", "it holds the lists train, test; save each as a file"),
        ('{"sentence": ["a", "b"], "label": [1]}', "sst2", "columns of different lengths (sentence 2, label 1)"),
        (json.dumps(squad()), "sst2", "it is a file of SQuAD; task 'sst2' is classification"),
        ('{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}', "squad", "nested (KeyError: 'context')"),
        ('{"data": [{"paragraphs": [3]}]}', "squad", "article 1: not as SQuAD is nested"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_one_line(text, task, words):
    with pytest.raises(UserError) as caught:
        rows(text, task)
    assert words in str(caught.value)
