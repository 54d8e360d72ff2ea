"""Columns of data sets are recognised, or what is not clear is one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from tiny import make_net
from transformers import BertConfig

from lit_compress.api.inputs import brought, choose_columns, splits_of
from lit_compress.utils.errors import UserError

NAMED = make_net("bert").config  # negative, positive
UNNAMED = BertConfig.from_dict({"num_labels": 3, "architectures": ["BertForSequenceClassification"]})


def chosen(columns, config=NAMED, trained=True, split="train", **given):
    return SimpleNamespace(**choose_columns(given, {split: Dataset.from_dict(columns)}, config, trained))


def test_usual_names_are_recognised_and_numbers_are_the_classes_of_the_model():
    found = chosen({"sentence": ["a", "b"], "label": [0, 1], "id": ["1", "2"]})
    assert (found.kind, tuple(found.text), found.label) == ("classification", ("sentence",), "label")
    assert found.labels == ["negative", "positive"]
    assert chosen({"text": ["a"], "labels": [2]}, UNNAMED).labels == ["0", "1", "2"]
    assert chosen({"text": ["a"], "labels": [2]}, UNNAMED, trained=False).labels is None
    pair = chosen({"premise": ["a"], "hypothesis": ["b"], "idx": [1], "label": [0]})
    assert tuple(pair.text) == ("premise", "hypothesis")


def test_names_of_the_data_are_classes_and_numbers_with_fractions_are_regression():
    features = Features({"body": Value("string"), "mood": ClassLabel(names=["bad", "good"])})
    rows = Dataset.from_dict({"body": ["a", "b"], "mood": [0, 1]}, features=features)
    found = choose_columns({}, {"train": rows}, UNNAMED, True)
    assert found == {"kind": "classification", "text": ["body"], "label": "mood", "labels": ["bad", "good"]}
    assert chosen({"text": ["a"], "label": [0.5]}, UNNAMED).kind == "regression"
    assert chosen({"text": ["a"], "label": ["positive"]}).labels == ["negative", "positive"]
    assert chosen({"text": ["a", "b"], "label": ["x", "y"]}, split="validation").labels == ["x", "y"]
    half = BertConfig.from_dict({"id2label": {"0": "LABEL_0", "1": "good"}, "architectures": ["BertForX"]})
    assert chosen({"text": ["a", "b"], "label": ["LABEL_0", "good"]}, half).labels == ["LABEL_0", "good"]
    assert chosen({"text": ["a", "b"], "label": ["x", "y"]}).labels is None  # read with the training rows


def test_whole_numbers_with_a_point_are_the_classes_of_a_trained_head():
    for labels in ([0.0, 1.0, 2.0], [2.0, None, 0.0]):
        found = chosen({"text": ["a", "b", "c"], "label": labels}, UNNAMED)
        assert (found.kind, found.labels) == ("classification", ["0", "1", "2"])
    for labels in ([0.0, 1.5], [1.0, 3.0], [-1.0, 1.0]):
        assert chosen({"text": ["a", "b"], "label": labels}, UNNAMED).kind == "regression"
    plain = BertConfig(architectures=["BertModel"])  # its two labels are a default that nobody chose
    assert chosen({"text": ["a", "b"], "label": [0.0, 1.0]}, plain, trained=False).kind == "regression"


@pytest.mark.parametrize(
    ("columns", "given", "line"),
    [
        ({"a": ["x"], "b": ["y"], "label": [0]}, {}, "text: which column holds the texts is not clear; name it"),
        (
            {"input_ids": [[1]], "label": [0]},
            {},
            "text: no column holds texts, only the tokens of texts; give the data",
        ),
        ({"n": [1], "label": ["a"]}, {}, "text: no column holds texts; columns: n, label"),
        (
            {"text": ["x"], "label": [0]},
            {"text": "texts"},
            "text: the data has no column 'texts'; did you mean 'text'?",
        ),
        (
            {"text": ["x"], "label": [0]},
            {"label": "labl"},
            "label: the data has no column 'labl'; did you mean 'label'?",
        ),
        ({"text": ["x"]}, {"kind": "clasification"}, "kind: unknown 'clasification'; did you mean 'classification'?"),
    ],
)
def test_mistakes_are_one_line(columns, given, line):
    with pytest.raises(UserError, match=line.replace("?", r"\?")):
        chosen(columns, **given)


def test_options_are_plain_values(tmp_path):
    rows = Dataset.from_dict({"body": ["a"], "x": [0], "y": [1]})
    given = {"text": "body", "label": ("x", "y")}
    model, options = brought("nowhere", None, rows, given, tmp_path)
    assert model == "nowhere" and options.pop("data.path") == str(tmp_path / "data")
    custom = {"kind": "multi_label", "text": ["body"], "label": ["x", "y"]}
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
