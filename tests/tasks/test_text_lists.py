"""Lists as text: JSON's and Python's are read, sentences stay sentences, and what cannot be read is one line."""

import json

import numpy as np
import pytest

from lit_compress.tasks.text_lists import list_in
from lit_compress.utils.errors import UserError

WORDS = [["EU", "rejects", "it's"], ['say "no"', "Straße 5", "a, b"], ["x"], ["back\\slash", "😀", "..."]]


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("write", [str, json.dumps, tuple])
def test_a_list_is_read_however_it_was_written(words, write):
    assert list_in("", str(write(words))) == list_in("", f" {write(words)}\n") == words


@pytest.mark.parametrize("numbers", [[0, 1, 2], (0, 1, 2), [False, True, 2.0]])
def test_numbers_are_read_where_items_need_no_quotes(numbers):
    assert list_in("", str(numbers), bare=True) == [0, 1, 2] and list_in("", str(numbers)) is None


@pytest.mark.parametrize(
    "text", ["", "plain words", "[1]", "[ he said ]", "( see above )", "[Laughter] yes [applause]", "(other)", "{x}",
             "( ' quoted ' )", '["Quoted" he said] and left', "array of words", "[other", "don't"],
)  # fmt: skip
def test_a_sentence_is_no_list(text):
    assert list_in("", text) is None


def test_a_name_in_brackets_is_no_list():
    assert list_in("", "(other)", bare=True) is None and list_in("", "[PAD] O [SEP]", bare=True) is None


@pytest.mark.parametrize("text", [str(np.array(["a", "b"])), "['a', b, 'c']", "['it's', 'b']", "{'a', 'b'}"])
def test_what_cannot_be_read_is_one_line(text):
    with pytest.raises(UserError, match=r"f row 1 is .*a list that cannot be read; write it as JSON"):
        list_in("f row 1", text)


@pytest.mark.parametrize("text", ["[toxic, insult]", "{toxic,insult}", str(np.arange(3))])
def test_names_in_brackets_without_quotes_are_no_class(text):
    with pytest.raises(UserError, match="a list that cannot be read"):
        list_in("", text, bare=True)
