"""Predictions: the label of the file and the answer have one form."""

import pytest
import transformers
from tiny import read_rows, write_rows

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import write_predictions
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom


@pytest.mark.parametrize(
    ("kind", "labels", "rows", "given"),  # a text column may be called like an answer
    [
        ("classification", None, ["yes", "no", "yes"], ["yes", "no", "yes"]),
        ("classification", ["5", "1", "0"], [0, 1, 5], ["0", "1", "5"]),  # a class number is also a class's name
        ("multi_label", None, [["yes"], ["no", "yes"], []], [["yes"], ["no", "yes"], []]),
        ("tagging", None, ["B O", "O", "B"], [["B", "O"], ["O"], ["B"]]),
        ("regression", None, [1.5, 0, 2], [1.5, 0.0, 2.0]),
    ],
)
def test_given_labels_and_answers_have_one_form(tiny_backbone, tmp_path, kind, labels, rows, given):
    column, texts = {"tagging": "tokens", "regression": "score"}.get(kind, "text"), ["a film", "great", "plot"]
    lines = [{column: text, "label": row} for text, row in zip(texts, rows, strict=True)]
    write_rows(tmp_path, train=lines, validation=lines)
    custom = Custom(kind=kind, text=[column], label="label", labels=labels)
    data = DataModule("custom", str(tiny_backbone), str(tmp_path), batch_size=2, custom=custom)
    config = transformers.AutoConfig.from_pretrained(tiny_backbone, **task_type(data.record).head(data.record))
    net = getattr(transformers, task_type(data.record).auto_class).from_config(config).eval()
    assert write_predictions(net, data, tmp_path / "predictions.jsonl") == (3, 3)
    found = read_rows(tmp_path / "predictions.jsonl")
    assert [line["given"] for line in found] == given
    if kind == "regression":  # whose labels are as in the file
        assert [line["score_text"] for line in found] == texts and all(type(line["score"]) is float for line in found)
    else:
        assert all(type([*line.values()][[*line].index("given") + 1]) is type(line["given"]) for line in found)
