"""Encoding is right, kept on disk, and made again when anything that decides it changes."""

from dataclasses import replace

import pytest
from datasets import Dataset
from tokenizers import normalizers, pre_tokenizers, processors

from lit_compress.data import encode as room
from lit_compress.data.encode import encode, encoding_key
from lit_compress.models.backbones import load_tokenizer
from lit_compress.tasks.records import Spans, Task, Writing, get_task

SST2, MRPC = get_task("sst2"), get_task("mrpc")


@pytest.fixture
def tokenizer(backbone):
    return load_tokenizer(backbone, SST2)


@pytest.fixture
def rows():
    return Dataset.from_dict({"sentence": ["the film was good .", "bad"], "label": [1, 0]})


def test_the_tokenizer_is_as_it_was(rows, tokenizer):
    """Its file is part of every export, and would differ where the tokens are read from the cache."""
    before = tokenizer.backend_tokenizer.to_str()
    encode(rows, tokenizer, get_task("sst2"), 5)
    assert tokenizer.backend_tokenizer.to_str() == before
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    before = tokenizer.backend_tokenizer.to_str()
    encode(rows, tokenizer, get_task("sst2"), 6)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_pairs_and_truncation(tokenizer):
    rows = Dataset.from_dict({"sentence1": ["a b c d e f g h"], "sentence2": ["the film"]})
    encoded = encode(rows, tokenizer, MRPC, 8)[0]
    assert "labels" not in encoded
    assert tokenizer.decode(encoded["input_ids"]) == "[CLS] a b c [SEP] the film [SEP]"
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1] and encoded["length"] == 8 and encoded["truncated"]


def test_the_second_time_is_read_from_disk(rows, tokenizer, backbone, tmp_path, monkeypatch):
    first = encode(rows, tokenizer, SST2, 32)
    assert [entry.name for entry in (tmp_path / "cache").glob("tokens-*")] == [
        f"tokens-{encoding_key(rows, tokenizer, SST2, 32)}"
    ]
    monkeypatch.setattr(Dataset, "map", None)
    assert encode(rows, tokenizer, SST2, 32).to_dict() == first.to_dict()
    assert encode(rows, load_tokenizer(backbone, SST2), SST2, 32).to_dict() == first.to_dict()


def test_whatever_decides_the_result_changes_the_key(rows, tokenizer):
    longer = Dataset.from_dict({**rows.to_dict(), "sentence": ["the film was good .", "bad ."]})
    other_label = Dataset.from_dict({**rows.to_dict(), "label": [1, 1]})
    keys = [encoding_key(data, tokenizer, SST2, 32) for data in (rows, longer, other_label, rows.select([1, 0]))]
    keys.append(encoding_key(rows, tokenizer, SST2, 31))
    for change in (lambda: tokenizer.add_tokens(["films"]), lambda: setattr(tokenizer, "bos_token", "film")):
        change()
        keys.append(encoding_key(rows, tokenizer, SST2, 32))
    short = replace(SST2, writing=Writing(target_length=9)), replace(SST2, spans=Spans(stride=9))
    keys += [encoding_key(rows, tokenizer, task, 32) for task in short]
    assert len(set(keys)) == 9


def test_the_number_of_labels_decides_how_many_a_row_has(tokenizer):
    """Of the same rows, which have the numbers of their labels."""
    two = Task("custom", "multi_label", ("text",), ("a", "b"), (), None, label="labels")
    rows = Dataset.from_dict({"text": ["good", "bad"], "labels": [[1], []]})
    for task, first in ((two, [0, 1]), (replace(two, labels=("a", "b", "c")), [0, 1, 0])):
        assert encode(rows, tokenizer, task, 32)["labels"][0] == first


CHANGES = {
    "truncation_side": "left", "split_special_tokens": True, "tgt_lang": "fr_XX", "bos_token": "film",
    "unk_token": "film", "model_input_names": ["input_ids", "attention_mask"],
    "normalizer": normalizers.NFC(), "pre_tokenizer": pre_tokenizers.WhitespaceSplit(),
    "post_processor": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_changes_tokens_changes_the_key_of_a_tokenizer(tokenizer, name):
    before = room.tokenizer_key(tokenizer)
    backend = name in ("normalizer", "pre_tokenizer", "post_processor")
    setattr(tokenizer.backend_tokenizer if backend else tokenizer, name, CHANGES[name])
    assert room.tokenizer_key(tokenizer) != before


def test_how_the_rows_are_held_does_not_change_the_key(rows, tokenizer):
    twice = Dataset.from_dict({"sentence": rows["sentence"][:] * 2, "label": rows["label"][:] * 2})
    assert room.content_key(twice.select([0, 1])) == room.content_key(twice.select([2, 3])) == room.content_key(rows)
