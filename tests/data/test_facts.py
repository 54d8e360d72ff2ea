"""The facts of the data against plain counts."""

from types import SimpleNamespace

import datasets

from lit_compress.data.facts import data_facts
from lit_compress.tasks.records import get_task


def tokens(*lengths, cut=()):
    return datasets.Dataset.from_dict({"length": list(lengths), "truncated": [i in cut for i in range(len(lengths))]})


def rows(**columns):
    return datasets.Dataset.from_dict(columns)


def facts_of(task, splits):
    facts = data_facts(get_task(task), splits, 9)
    assert facts["max_length"] == 9 and [split["split"] for split in facts["splits"]] == list(splits)
    return [SimpleNamespace(**split) for split in facts["splits"]]


def test_facts_of_one_text_and_two_splits():
    train = rows(sentence=["a", "b", "a", " ", "a"], label=[0, 1, 1, 0, 1])
    dev = rows(sentence=["b", "c", "c", ""], label=[1, 1, 1, 1])
    splits = {"train": (train, tokens(3, 3, 3, 2, 9, cut=[4]), 8), "validation": (dev, tokens(3, 3, 4, 2), 4)}
    first, second = facts_of("sst2", splits)
    assert (first.rows, first.available, first.inputs, first.longest, first.cut) == (5, 8, 5, 9, 1)
    assert (first.empty, first.repeated, first.in_train) == (1, 2, 0)
    assert (second.rows, second.empty, second.repeated, second.in_train) == (4, 1, 1, 1)
    assert first.classes == [{"name": "negative", "count": 2}, {"name": "positive", "count": 3}]
    assert second.classes == [{"name": "negative", "count": 0}, {"name": "positive", "count": 4}]


def test_two_texts_are_the_same_row_only_together():
    train = rows(sentence1=["a", "a"], sentence2=["b", "c"], label=[0.5, 1.0])
    dev = rows(sentence1=["a", "b"], sentence2=["b", "a"], label=[0.5, 1.0])
    facts = facts_of("stsb", {"train": (train, tokens(1, 1), 2), "validation": (dev, tokens(1, 1), 2)})
    assert [(s.repeated, s.in_train, s.classes) for s in facts] == [(0, 0, []), (0, 1, [])]


def test_words_have_classes():
    train = rows(tokens=[["a", "b"], ["a", "b"], ["c"]], ner_tags=[[0, 1], [0, 0], [3]])
    (facts,) = facts_of("conll2003", {"train": (train, tokens(1, 1, 1, 1), 3)})
    assert facts.repeated == 1 and facts.inputs == 4 and facts.empty == 0
    assert [c["count"] for c in facts.classes] == [3, 1, 0, 1, 0, 0, 0, 0, 0]


def test_lines_of_one_text_are_not_compared():
    text = rows(text=["\n", "a\n", "\n"])
    splits = {"train": (text, tokens(8), 3), "validation": (text, tokens(8), 3)}
    assert [(s.empty, s.repeated, s.in_train) for s in facts_of("wikitext2", splits)] == [(0, 0, 0)] * 2
