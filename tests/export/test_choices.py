"""What users choose for an export: a vocabulary cut to the data, a smaller table of embeddings, number formats."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny import WORDS, make_net
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertTokenizer

from lit_compress.data.batching import drawn_order
from lit_compress.data.datamodule import DataModule
from lit_compress.data.facts import pieces_missed
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export.choices import Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.fuse import cast, outline_export
from lit_compress.export.program import Program, read_program
from lit_compress.export.report import Measured
from lit_compress.export.runtimes import RUNTIMES
from lit_compress.export.vocabulary import _used as used
from lit_compress.export.vocabulary import tokens_kept
from lit_compress.models.accounting import count_params
from lit_compress.models.backbones import load_net as load_backbone
from lit_compress.models.files import net_bytes
from lit_compress.models.outline import file_bytes
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import factorize, without_values
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNUSED = [f"unused{letter}" for letter in LETTERS[:10]] + ["ghost", "##ly"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A BERT whose tokenizer knows every letter, the words of the data and some others."""
    folder = tmp_path_factory.mktemp("letters")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *UNUSED, *WORDS, *(f"##{x}" for x in LETTERS), *LETTERS]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    make_net("bert", vocab_size=len(tokenizer) + 3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(backbone, tiny_data):
    return DataModule("sst2", str(backbone), str(tiny_data), batch_size=8)


@pytest.fixture(scope="module")
def export(backbone, data, tmp_path_factory):
    """export(**choices) -> folder, report, card; of a factorized net. The same choices are exported once."""
    place, made = tmp_path_factory.mktemp("dense"), {}
    save_net(load_backbone(str(backbone), get_task("sst2")), place)

    def run(**choices):
        if (key := tuple(sorted(choices.items()))) not in made:
            out, net, dense = tmp_path_factory.mktemp("out"), load_net(place), load_net(place)
            factorize(net, {"bert.encoder.layer.0.output.dense": 5}, lambda _, w, r: (w[:, :r], torch.eye(r, 64)))
            config = {"model": {"init_args": {"backbone": "tiny"}}}
            before = {"dense": Measured(dense, net_bytes(place), 0.5)}
            write_export(out, Export(net, before, "SVD", data, config), Choices(**choices))
            made[key] = out
        out = made[key]
        return out, json.loads((out / "report.json").read_text()), (out / "README.md").read_text()

    return run


def logits(folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        return net(**tokenizer(texts, return_tensors="pt", padding=True)).logits


def test_the_vocabulary_of_the_data(export, data):
    """Same logits on the texts of the data, smaller files, and unseen words are spelled."""
    whole, before, card = export()
    assert before["vocabulary"] is None and "pieces are left" not in card
    texts = data.val_dataloader()[0].dataset.rows["sentence"][:8]
    expected, seen = logits(whole, texts), AutoTokenizer.from_pretrained(whole)
    out, report, card = export(vocabulary="data")
    assert torch.allclose(logits(out, texts), expected, atol=1e-6)
    left = 5 + len(set(WORDS) | set(LETTERS)) + len(LETTERS)
    counts = {"inputs": 100, "changed": 0, "dev_inputs": 40, "dev_changed": 0}
    assert report["vocabulary"] == {"rows": left, "of": len(seen) + 3, **counts}
    assert f"{left} of {len(seen) + 3} pieces are left" in card
    small = AutoTokenizer.from_pretrained(out)
    assert len(small) == left == json.loads((out / "config.json").read_text())["vocab_size"]
    assert seen.tokenize("ghostly film") == ["ghost", "##ly", "film"]
    assert small.tokenize("ghostly film") == ["g", *(f"##{x}" for x in "hostly"), "film"]
    cut = before["compressed"]["params"]["total"] - report["compressed"]["params"]["total"]
    assert cut == 32 * (len(seen) + 3 - left)
    assert before["compressed"]["bytes"] - report["compressed"]["bytes"] >= 4 * cut - 100
    assert report["compressed"]["metric"] == before["compressed"]["metric"]


def test_a_smaller_table(export, data):
    """After the cut of the vocabulary: bytes, parameters, report and card; the folder loads elsewhere."""
    _, before, _ = export(vocabulary="data")
    out, report, card = export(vocabulary="data", embeddings="int8")
    rows, found = report["vocabulary"]["rows"], report["embeddings"]
    size = rows * (32 + 4)
    assert found["form"] == "int8" and (found["bytes"], found["of"]) == (size, 4 * 32 * rows) and 0 < found["error"] < 1
    saved = before["compressed"]["bytes"] - report["compressed"]["bytes"]
    assert abs(saved - (found["of"] - found["bytes"])) < 500  # names and shapes
    left = report["compressed"]["params"]["total"] - report["compressed"]["params"]["non_embedding"]
    assert left == rows * 33 + 32 * (64 + 2 + 2)
    assert f"embeddings: int8, {size:,} of {found['of']:,} bytes" in card
    net, texts = load_net(out), data.val_dataloader()[0].dataset.rows["sentence"][:8]
    inputs = AutoTokenizer.from_pretrained(out)(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        assert torch.allclose(net(**inputs).logits, logits(out, texts), atol=1e-6)


def test_sixteen_bits(export, data):
    """Half the bytes; elsewhere the folder is loaded in that dtype, and here it is measured in float32, as all are."""
    dtype = "bfloat16"
    _, before, _ = export(vocabulary="data", embeddings="int8")
    out, report, card = export(vocabulary="data", embeddings="int8", dtype=dtype)
    assert report["dtype"] == dtype and before["dtype"] == "float32" and report["export_difference"] <= 1e-5
    floats = report["compressed"]["params"]["total"] - 32 * report["embeddings"]["of"] // 128
    assert before["compressed"]["bytes"] - report["compressed"]["bytes"] == pytest.approx(2 * floats, abs=100)
    assert f"The weights are stored as {dtype}" in card
    assert report["embeddings"]["bytes"] == report["embeddings"]["of"] // 128 * (32 + 2)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    net, inputs = load_net(out, as_stored=True), torch.tensor([[2, 9, 20, 3]])
    elsewhere = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True).eval()
    assert net.dtype == elsewhere.dtype == getattr(torch, dtype) != load_net(out).dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(net(inputs).logits, elsewhere(inputs).logits)
    assert evaluate(load_net(out), data)["val/accuracy"] == report["compressed"]["metric"]


def test_the_file_is_as_large_as_was_said_before(export, data, backbone):
    choices = {"vocabulary": "data", "embeddings": "int8", "dtype": "bfloat16"}
    net = load_backbone(str(backbone), get_task("sst2"))
    empty = without_values(lambda: type(net)(net.config))
    with torch.device("meta"):
        factorize(empty, {"bert.encoder.layer.0.output.dense": 5}, None)
    small = outline_export(empty, Choices(**choices), tokens_kept(empty, data))
    out, report, _ = export(**choices)
    assert file_bytes(small) == (out / "model.safetensors").stat().st_size
    assert count_params(small).total == report["compressed"]["params"]["total"]
    assert empty.config.vocab_size == net.config.vocab_size


def test_a_weight_that_a_dtype_cannot_hold():
    net = make_net("bert")
    net.classifier.bias.data[0] = 1e5
    with pytest.raises(UserError, match=r"--dtype float16 cannot hold the values of 'classifier.bias'; nearest: bf"):
        cast(net, "float16")


@pytest.mark.slow
def test_a_program_of_eight_bits(export, data):
    """Matrices are integers, the metric is that of the file, and its logits are near those of the folder."""
    import onnx

    out, report, card = export(format="onnx", dtype="int8", embeddings="int8")
    found, file = report["program"], onnx.load(out / "model.onnx")
    assert found["dtype"] == "int8" and found["examples"] == 100 and report["dtype"] == "float32"
    assert found["bytes"] == (out / "model.onnx").stat().st_size
    stored = {tuple(i.dims) for i in file.graph.initializer if i.data_type == onnx.TensorProto.INT8}
    assert {(32, 32), (32, 64), (64, 5), (5, 32), (64, 32)} <= stored
    assert not any(i.data_type == onnx.TensorProto.FLOAT and len(i.dims) == 2 and min(i.dims) > 1
                   for i in file.graph.initializer)  # fmt: skip
    zeros = {node.input[2] for node in file.graph.node if node.op_type == "QuantizeLinear"}  # else in float
    assert {i.data_type for i in file.graph.initializer if i.name in zeros} == {onnx.TensorProto.UINT8}
    program = Program(read_program(out / "model.onnx", ("logits",)), load_net(out).config)
    assert found["metric"] == evaluate(program, data)["val/accuracy"]
    assert f"dev accuracy {found['metric']:.4f} (0." in card and "with 100 training examples" in card
    inputs = AutoTokenizer.from_pretrained(out)(
        data.val_dataloader()[0].dataset.rows["sentence"][:8], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        off = program(**inputs).logits - load_net(out)(**inputs).logits
    assert 0 < off.abs().max() < 0.1
    assert not list(out.glob("*.int8.onnx"))


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"dtype": "int8"}, "--format hf has no --dtype int8; give --format onnx or openvino"),
        ({"dtype": "int8", "format": "hf"}, "--format hf has no --dtype int8; give --format onnx or openvino"),
        ({"dtype": "int4", "format": "onnx"}, "--format onnx has no --dtype int4; give --format openvino"),
        ({"max_drop": -0.5}, "--max_drop -0.5 is not a number of points; the smallest is 0"),
        ({"dtype": "float16", "format": "onnx"}, "--format onnx writes a program of float32, --dtype float16 is for"),
        ({"embeddings": "int9"}, "--embeddings 'int9' is not valid; int8 or none"),
        ({"embeddings": "rank=6"}, "--embeddings 'rank=6' is not valid; int8 or none"),
    ],
)
def test_choices_that_are_refused(choices, text, export):
    with pytest.raises(UserError, match=re.escape(text)):
        export(**choices)


@pytest.mark.parametrize(
    ("family", "task", "words"),
    [
        ("bert", "sst2", "for models that write text"),
        ("bart", "xsum", "cannot measure a model that writes"),
    ],
)
def test_integers_of_4_bits_are_for_models_that_write(family, task, words):
    with pytest.raises(UserError, match=words):
        Choices("openvino", dtype="int4").check(make_net(family, task))


@pytest.mark.parametrize(
    ("mode", "metrics", "program", "lost"),
    [
        ("max", (0.85, 0.84), None, 1.0), ("max", (0.85, 0.85), {"metric": 0.844, "dtype": "int8"}, 0.6),
        ("max", (0.85, 0.8), {"metric": 0.86, "dtype": "int8"}, -1.0), ("min", (20.0, 20.7), {"bytes": 5}, 0.7),
        ("max", (0.85, float("nan")), None, float("nan")),
    ],
)  # fmt: skip
def test_an_export_that_loses_too_much(mode, metrics, program, lost):
    """In points, of the program of integers if there is one; a perplexity that rises loses."""
    report = {"dense": {"metric": metrics[0]}, "compressed": {"metric": metrics[1]}, "program": program}
    report["metric"] = {"name": "accuracy", "mode": mode}
    Choices().check_drop(report)
    if lost <= 0.9:
        Choices(max_drop=0.9).check_drop(report)
    if not lost <= 0.5:
        with pytest.raises(UserError, match=rf"dev accuracy goes from .*, {lost:.2f} points, more than --max_drop 0.5"):
            Choices(max_drop=0.5).check_drop(report)


def test_perplexities_of_two_vocabularies_are_not_compared():
    report = {"dense": {"metric": 20.0}, "compressed": {"metric": 15.0}, "vocabulary": {"dev_changed": 3}}
    report["metric"] = {"name": "perplexity", "mode": "min"}
    with pytest.raises(UserError, match="perplexities of the same pieces, and 3 dev inputs have others"):
        Choices(max_drop=5).check_drop(report)
    report["vocabulary"]["dev_changed"] = 0
    Choices(max_drop=5).check_drop(report)


class Names:
    """A tokenizer whose pieces are ``p0``, ``p1`` and so on, and one free place."""

    def convert_ids_to_tokens(self, ids):
        return [f"[unused{i}]" if i == 4 else f"p{i}" for i in ids]


def test_pieces_that_texts_of_the_same_kind_need_stay():
    """Every second text has a piece that no other has; of a tenth that is left out at most 10 % may miss one."""
    rows = [[10, 11, 100 + row] if row % 2 else [10, 11] for row in range(100)]
    tokens, record = lambda: Dataset.from_dict({"input_ids": rows}), get_task("sst2")
    data = SimpleNamespace(train_tokens=tokens, tokenizer=Names(), record=record)
    drawn, missed = sorted(drawn_order(100, 0)[:10]), pieces_missed(data.train_tokens(), 300).tolist()
    assert missed == [100 + row if row % 2 else -1 for row in drawn]
    net = SimpleNamespace(config=BertConfig(vocab_size=300), can_generate=lambda: False)
    assert used(net, data) == {*range(sorted(missed)[-2] + 1), *(i for row in rows for i in row)} - {4}
    rows[:] = [[10, 11 + row % 3] for row in range(100)]  # any nine tenths have all that the others need
    assert pieces_missed(data.train_tokens(), 300).tolist() == [-1] * 10 and used(net, data) == {0, 10, 11, 12, 13}


def test_missing_packages_are_one_line(monkeypatch):
    monkeypatch.setattr(
        "lit_compress.export.choices.find_spec",
        lambda name: None if name in ("nncf", *RUNTIMES["onnx"].packages) else True,
    )
    Choices().check()
    for form, missing in (("onnx", "onnx, onnxscript, onnxruntime, nncf"), ("openvino", "nncf")):
        with pytest.raises(UserError, match=rf"needs {missing}; in the clone: pip install '.\[{form}\]'"):
            Choices(format=form).check()
