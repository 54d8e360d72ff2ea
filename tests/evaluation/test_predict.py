"""The answers of two nets, next to each other."""

import pytest
import transformers
from tiny import make_net, write_rows

from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import answers
from lit_compress.export.vocabulary import cut_vocabulary
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom


def test_each_net_reads_the_pieces_of_its_own_tokenizer(tiny_backbone, tmp_path):
    """A net with fewer tokens has other ids for the same words."""
    rows = [{"sentence": text, "label": n % 2} for n, text in enumerate(["cast and but", "but story", "plot"])]
    write_rows(tmp_path, train=rows, validation=rows)
    net, data = make_net().eval(), DataModule("sst2", str(tiny_backbone), str(tmp_path), batch_size=2)
    small, own, found = cut_vocabulary(net, data)
    assert found["rows"] < 30 and small.config.vocab_size == found["rows"]
    lines = answers([(net, data), (small, own)])
    assert [line["texts"]["sentence"] for line in lines] == ["cast and but", "but story", "plot"]
    assert all(before == after for before, after in (line["answers"] for line in lines))


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
    found = answers([(net, data)])
    assert [line["given"] for line in found] == given
    assert all(type(line["answers"][0]) is type(line["given"]) for line in found)
