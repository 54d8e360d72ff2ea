"""Predictions: the label of the file and the answer have one form."""

import json

import pytest
import transformers
from tiny import write_rows

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import write_predictions
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom


@pytest.mark.parametrize(
    ("kind", "labels", "rows", "given"),
    [
        ("classification", None, ["yes", "no", "yes"], ["yes", "no", "yes"]),
        ("classification", ["5", "1", "0"], [0, 1, 5], ["0", "1", "5"]),  # a class number is also a class's name
        ("multi_label", None, ["yes", "no|yes", ""], [["yes"], ["no", "yes"], []]),
        ("tagging", None, ["B O", "O", "B"], [["B", "O"], ["O"], ["B"]]),
        ("regression", None, [1.5, 0, 2], [1.5, 0.0, 2.0]),
    ],
)
def test_given_labels_and_answers_have_one_form(tiny_backbone, tmp_path, kind, labels, rows, given):
    column = "tokens" if kind == "tagging" else "text"
    lines = [{column: text, "label": row} for text, row in zip(["a film", "great", "plot"], rows, strict=True)]
    write_rows(tmp_path, train=lines, validation=lines)
    custom = Custom(kind=kind, text=[column], label="label", labels=labels)
    data = DataModule("custom", str(tiny_backbone), str(tmp_path), batch_size=2, custom=custom)
    config = transformers.AutoConfig.from_pretrained(tiny_backbone, **task_type(data.record).head(data.record))
    net = getattr(transformers, task_type(data.record).auto_class).from_config(config).eval()
    assert write_predictions(net, data, tmp_path / "predictions.jsonl") == (3, 3)
    found = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["given"] for line in found] == given
    if kind != "regression":  # whose labels are as in the file
        assert all(type([*line.values()][[*line].index("given") + 1]) is type(line["given"]) for line in found)
