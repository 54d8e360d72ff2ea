"""Objects become files and options, or one line says what they are not."""

from __future__ import annotations

import pytest
from datasets import Dataset

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


def test_splits_have_the_names_of_the_package():
    rows = Dataset.from_dict({"text": ["a"]})
    assert list(splits_of(rows, None)) == ["train"] and list(splits_of(rows, "test")) == ["test"]
    assert list(splits_of({"train": rows, "dev": rows}, None)) == ["train", "validation"]
    for data, line in (
        ([{"text": "a"}], "data: a list is no Dataset or DatasetDict"),
        ({"dev": rows, "validation": rows}, "two of the splits dev, validation are the same"),
        ({"trian": rows}, "did you mean 'train'"),
        (rows.select([]), "the split 'train' has no rows"),
    ):
        with pytest.raises(UserError, match=line):
            splits_of(data, None)
