"""Objects become files and options, or one line says what they are not."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tiny import write_backbone
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

import lit_compress as lc
from lit_compress.api.inputs import brought, splits_of
from lit_compress.utils.errors import UserError


def test_options_are_plain_values(tmp_path):
    rows = Dataset.from_dict({"body": ["a"], "x": [0], "y": [1]})
    given = {"kind": "multi_label", "text": "body", "label": ("x", "y")}
    model, options = brought("nowhere", None, rows, given, tmp_path)
    assert model == "nowhere" and options.pop("data.path") == str(tmp_path / "data")
    custom = {"kind": "multi_label", "text": "body", "label": ["x", "y"]}
    assert options == {"data.task": "custom", **{f"data.custom.{name}": value for name, value in custom.items()}}
    assert brought("nowhere", None, "x.csv", {}, tmp_path)[1] == {"data.task": "custom", "data.path": "x.csv"}
    with pytest.raises(UserError, match="text: task 'sst2' has its own columns"):
        brought("nowhere", None, rows, {"task": "sst2", "text": "text"}, tmp_path)


def test_a_tokenizer_that_reads_less_is_another_one(tiny_backbone):
    """Its files are kept in the cache, for a run that continues."""
    net = AutoModelForSequenceClassification.from_pretrained(tiny_backbone)
    tokenizer, found = AutoTokenizer.from_pretrained(tiny_backbone), []
    for length in (64, 16, 512):  # the net has 64 positions
        tokenizer.model_max_length = length
        folder, _ = brought(net, tokenizer, "x.csv", {}, None)
        found.append((folder, min(64, AutoTokenizer.from_pretrained(folder).model_max_length)))
    assert [length for _, length in found] == [64, 16, 64] and found[0] == found[2]


def test_a_model_that_writes_otherwise_is_another_one(tmp_path):
    folder = write_backbone(tmp_path, "bart", "xsum")
    net, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for beams, template in ((2, None), (5, None), (2, "{{ messages }}")):
        net.generation_config.num_beams, tokenizer.chat_template = beams, template
        kept, _ = brought(net, tokenizer, "x.csv", {}, None)
        own = GenerationConfig.from_pretrained(kept), AutoTokenizer.from_pretrained(kept)
        found.append((own[0].num_beams, own[1].chat_template))
    assert found == [(2, None), (5, None), (2, "{{ messages }}")]


def test_what_is_no_data_set_and_splits_that_nobody_knows_are_one_line(tiny_backbone):
    rows = Dataset.from_dict({"sentence": ["a"], "label": [0]})
    assert list(splits_of(rows, None)) == ["train"] and list(splits_of(rows, "test")) == ["test"]
    for data, line in (
        ([{"sentence": "a"}], "data: a list is no Dataset or DatasetDict"),
        ({"dev": rows, "val": rows, "train": rows}, "data: two of the splits dev, val, train are the same; leave one"),
        ({"trian": rows}, r"has no split '\w+'; valid: trian"),
        ({"train": rows, "dev": rows.select([])}, "data: the split 'dev' has no rows"),
        ({"validation": rows, "dev": rows}, "data: two of the splits validation, dev are the same; leave one"),
    ):
        with pytest.raises(UserError, match=line):
            lc.factorize(str(tiny_backbone), data=data, task="sst2")
