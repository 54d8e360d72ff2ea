"""Lists as text: every writer's form is read, sentences stay sentences, and what cannot be read is one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.errors import UserError

WORDS = [["EU", "rejects", "it's"], ['say "no"', "Straße 5", "a, b"], ["x"], ["back\\slash", "😀", "..."]]


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize(
    "write", [str, json.dumps, tuple, np.array, lambda w: np.array(w, dtype=object), lambda w: repr(np.array(w)),
              lambda w: repr(np.array(w, dtype=object)), lambda w: list(np.array(w))],
)  # fmt: skip
def test_a_list_is_read_however_it_was_written(words, write):
    assert list_in("", str(write(words))) == list_in("", f" {write(words)}\n") == words


@pytest.mark.parametrize("array", [np.arange(3), np.array([0.0, 1.0, 2.0]), [0, 1, 2], (0, 1, 2), {0, 1, 2}])
def test_numbers_are_read_where_items_need_no_quotes(array):
    assert list_in("", str(array), bare=True) == [0, 1, 2] and list_in("", str(array)) is None


def test_a_long_array_is_written_in_lines():
    assert list_in("", str(np.array([f"word{i}" for i in range(200)]))) == [f"word{i}" for i in range(200)]


def test_what_spark_and_a_database_write():
    assert list_in("", "[very toxic, insult]", bare=True) == list_in("", "{very toxic,insult}", bare=True)
    assert list_in("", "{very toxic,insult}", bare=True) == ["very toxic", "insult"]
    assert list_in("", "{'a', 'b'}") == ["a", "b"] and list_in("", "[]") == []


@pytest.mark.parametrize(
    "text", ["", "plain words", "[1]", "[ he said ]", "( see above )", "[Laughter] yes [applause]", "(other)", "{x}",
             "( ' quoted ' )", '["Quoted" he said] and left', "array of words", "[other", "don't"],
)  # fmt: skip
def test_a_sentence_is_no_list(text):
    assert list_in("", text) is None


def test_a_name_in_brackets_is_no_list():
    assert list_in("", "(other)", bare=True) is None and list_in("", "[PAD] O [SEP]", bare=True) is None


@pytest.mark.parametrize(
    "text", ["['a' 'b' ... 'y' 'z']", "['a', b, 'c']", "['it's', 'b']", "{'text': ['a'], 'b': 'c'}"]
)
def test_what_cannot_be_read_is_one_line(text):
    with pytest.raises(UserError, match=r"f row 1 is .*a list that cannot be read; write it as JSON"):
        list_in("f row 1", text)
