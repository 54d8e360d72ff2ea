"""Programs of integers: weights alone of a model that writes text, of 8 and 4 bits, the metric of the file."""

from __future__ import annotations

import copy
import random
import shutil

import numpy as np
import pytest
import torch
import transformers
from helpers import Tokenizer, net_of
from moments import decompose
from tiny import WORDS, write_model
from transformers import AutoModelForCausalLM

import lit_compress
from lit_compress.data.datamodule import DataModule
from lit_compress.evaluation.evaluate import evaluate
from lit_compress.export import integers
from lit_compress.export.fuse import fuse
from lit_compress.export.integers import quantize, quantize_program, training_feeds
from lit_compress.export.program import Program, program_bytes, read_program, write_program
from lit_compress.layers import LowRankLinear, LowRankSparseLinear
from lit_compress.models.accounting import dense_layers
from lit_compress.models.outline import estimated_bytes
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.surgery import factorize
from lit_compress.run.solve import GRAPH
from lit_compress.stages.base import Training
from lit_compress.stages.compression import Compression
from lit_compress.stages.rounded import RoundedStage
from lit_compress.utils.errors import UserError

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A decoder that reads 12 tokens at a time, its data, and what was told about its programs in float32."""
    pytest.importorskip("nncf")
    folder = tmp_path_factory.mktemp("writer")
    for name in ("net", "data", "onnx", "openvino"):
        (folder / name).mkdir()
    draw = random.Random(0).choices
    for split, rows in (("train", 60), ("validation", 20)):
        (folder / "data" / f"{split}.txt").write_text("\n".join(" ".join(draw(WORDS, k=20)) for _ in range(rows)))
    net = AutoModelForCausalLM.from_pretrained(write_model(folder / "net", "llama", "plain_text", **WIDE)).eval()
    data = DataModule("plain_text", str(folder / "net"), str(folder / "data"), batch_size=4, max_length=12)
    made = {form: write_program(net, data.tokenizer, folder / form, form) for form in ("onnx", "openvino")}
    return net, data, folder, made


def answers(writer, path, ids):
    with torch.no_grad():
        program = Program(read_program(path, ("logits",)), writer[0].config)
        return program(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize(
    ("form", "dtype", "off"), [("onnx", "int8", 0.04), ("openvino", "int8", 0.04), ("openvino", "int4", 0.4)]
)
def test_a_model_that_writes_has_integers_for_its_weights(form, dtype, off, writer, tmp_path):
    """Nothing is read for that. A table that is also the output layer is stored once; the size is as foreseen."""
    net, _, folder, made = writer
    file = made[form]["file"]
    quantize(folder / form / file, tmp_path / file, dtype)
    ids = torch.arange(5, 25)[None]
    exact, answer = net(input_ids=ids).logits.detach(), answers(writer, tmp_path / file, ids)
    assert off / 10 < (answer - exact).norm() / exact.norm() < off
    bits = {"int8": 8, "int4": 4}[dtype]
    assert abs(program_bytes(tmp_path / file) - estimated_bytes(net, bits, GRAPH[form])) < 0.1 * made[form]["bytes"]
    assert {path.suffix for path in tmp_path.iterdir()} == ({".onnx"} if form == "onnx" else {".xml", ".bin"})


def test_weights_of_4_bits_are_found_from_texts_without_padding(writer, tmp_path, monkeypatch):
    """They are nearer than rounded ones, at the same size."""
    net, data, folder, made = writer
    lengths, plain = set(), integers.quantize

    def seen(path, out, dtype, texts, *, way):
        lengths.update(text["input_ids"].shape for text in texts)
        plain(path, out, dtype, texts, way=way)

    monkeypatch.setattr(integers, "quantize", seen)
    shutil.copytree(folder / "openvino", tmp_path, dirs_exist_ok=True)
    told = quantize_program(tmp_path, made["openvino"], net, data, "int4")
    assert told["examples"] == 32 and len(lengths) == 1 and {rows for rows, _ in lengths} == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["openvino_model.bin", "openvino_model.xml"]
    ids = torch.arange(5, 17)[None]
    exact = net(input_ids=ids).logits.detach()
    plain(folder / "openvino" / "openvino_model.xml", tmp_path / "rounded.xml", "int4")
    found, rounded = (answers(writer, tmp_path / f"{name}.xml", ids) for name in ("openvino_model", "rounded"))
    assert (found - exact).norm() < (rounded - exact).norm() < 0.4 * exact.norm()


def test_rounded_weights_stay_as_they_are(writer, tmp_path):
    """No texts are read, and the program has the answers of the model, whose table has 8 bits."""
    net, data = copy.deepcopy(writer[0]), writer[1]
    RoundedStage("x", Training(), Compression()).round(net)
    exact = net(input_ids=(ids := torch.arange(5, 17)[None])).logits.detach()
    made = write_program(net, data.tokenizer, tmp_path, "openvino")
    assert quantize_program(tmp_path, made, net, data, "int4")["examples"] == 0
    assert (
        answers(writer, tmp_path / "openvino_model.xml", ids) - exact
    ).norm() / exact.norm() < 0.04  # as with 8 bits alone


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_metric_is_of_the_written_program(dtype, writer, tmp_path, monkeypatch):
    net, data, folder, programs = writer
    monkeypatch.setattr(integers, "WAY", {"scale_estimation": True})
    shutil.copytree(folder / "openvino", tmp_path, dirs_exist_ok=True)
    made = programs["openvino"]
    told = quantize_program(tmp_path, made, net, data, dtype)
    path = tmp_path / made["file"]
    written = evaluate(Program(read_program(path, ("logits",)), net.config), data)["val/perplexity"]
    assert told["metric"] == pytest.approx(written, rel=1e-6) and told["bytes"] == program_bytes(path) < made["bytes"]
    assert (
        told["metric"] != evaluate(net, data)["val/perplexity"] and told["examples"] == {"int8": 0, "int4": 32}[dtype]
    )


def test_what_a_library_cannot_do_is_one_line(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"--dtype int8 cannot quantize model.onnx: .*") as error:
        quantize(tmp_path / "model.onnx", tmp_path / "small.onnx", "int8", [])
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_texts_that_are_missing_are_one_line(tiny_backbone, tiny_data, tmp_path):
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data))
    (batch, *_) = training_feeds(data, "export: --dtype int8")
    assert {"input_ids", "attention_mask"} <= set(batch) and batch["input_ids"].dtype == np.int64
    for file in tiny_data.iterdir():
        if not file.name.startswith("train"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    data = DataModule("sst2", str(tiny_backbone), str(tmp_path))
    with pytest.raises(UserError, match=r"^export: --dtype int8 reads training texts: "):
        training_feeds(data, "export: --dtype int8")


NAMES = ("input_ids", "attention_mask", "token_type_ids")


def stacked_and_rows(net):
    """Query, key and value on one right factor; factors and rows elsewhere."""
    shared = stacks(net)
    ranks = {site.name: 12 for site in find_sites(net)}
    first = {name: rank for name, rank in ranks.items() if name in shared}
    inside = {name for names in shared.values() for name in names}
    factorize(net, first, lambda _, weight, rank: decompose(weight, rank), stacks=shared)
    rest = {name: rank for name, rank in ranks.items() if name not in inside}
    factorize(net, rest, lambda _, weight, rank: decompose(weight, rank), LowRankSparseLinear)
    for name in rest:
        net.get_submodule(name).sparse.data[::2] = 0
    return fuse(net)


def sizes_in_float(path):
    """Return the bytes of every constant in float."""
    if path.suffix == ".onnx":
        constants = pytest.importorskip("onnx").load(path).graph.initializer
        return [4 * int(np.prod(item.dims)) for item in constants if item.data_type == 1]
    nodes = pytest.importorskip("openvino").Core().read_model(path).get_ops()
    return [n.get_byte_size() for n in nodes if n.get_type_name() == "Constant" and n.get_element_type().is_real()]


def feeds(batches=4, vocabulary=100):
    generator = np.random.default_rng(1)
    ids = [generator.integers(5, vocabulary, (8, length)) for length in (9, 20, 31, 40)[:batches]]
    return [dict(zip(NAMES, (each, np.ones_like(each), each % 2), strict=True)) for each in ids]


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_a_text_has_the_same_answers_in_any_batch(form, tmp_path):
    """Alone, in a batch of 3, padded to 256; one of its tokens is unknown (1). No matrix stays in float."""
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "nncf"}[form])
    settings = {"max_position_embeddings": 256, "vocab_size": 3000, "hidden_size": 96, "task": "conll2003"}
    net = stacked_and_rows(net_of("bert", torch.float32, **settings)).eval()
    made = write_program(net, Tokenizer("token_type_ids"), tmp_path, form)
    path, before = tmp_path / made["file"], made["bytes"]
    assert before == sum(file.stat().st_size for file in tmp_path.iterdir())
    for place in (lit_compress, transformers):  # paths of where it was made
        assert place.__file__.rpartition("/")[0].encode() not in path.read_bytes()
    quantize(path, path, "int8", feeds(vocabulary=3000))
    assert all(size <= 256 * 4 or size == 3000 * 4 for size in sizes_in_float(path))  # biases, scales of a table
    assert program_bytes(path) < before / 2
    assert abs(program_bytes(path) - estimated_bytes(net, 8, GRAPH[form])) < 0.25 * program_bytes(path)
    program, text = Program(read_program(path, ("logits",)), net.config), [2, 1, 77, 2500, 9, 3]
    answers = []
    for rows, length in (([text], 6), ([text, [*range(30, 50)], [2, 5, 3]], 20), ([text], 256)):
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
        both = (each(**given).logits[0, :6].detach().flatten() for each in (program, net))
        answers.append(tuple(both))
    for answer, exact in answers:
        assert torch.cosine_similarity(answer, answers[0][0], dim=0) > 0.99999
        assert 0.9 < torch.cosine_similarity(answer, exact, dim=0) < 1


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_factors_whose_ranges_differ(form, tmp_path):
    """Between two factors ranges may differ by 50 times, as after training; of two ways to smooth them the better is
    taken, whichever is tried first."""
    pytest.importorskip("nncf")
    torch.manual_seed(0)
    net = net_of("bert", torch.float32, num_hidden_layers=1).eval()
    ranks = {name: min(layer.weight.shape) // 2 for name, layer in dense_layers(net).items()}
    net = factorize(net, ranks, lambda _, weight, rank: decompose(weight, rank)).eval()
    for layer in net.modules():
        if isinstance(layer, LowRankLinear):
            layer.right.data[::7] *= 50
            layer.left.data[:, ::7] /= 50
    made, given = write_program(net, Tokenizer("token_type_ids"), tmp_path, form), feeds(2)
    inputs = {name: torch.from_numpy(value) for name, value in given[1].items()}
    exact = net(**inputs).logits.detach()

    def error(*smooth):
        quantize(
            tmp_path / made["file"],
            small := tmp_path / ("small.onnx" if form == "onnx" else "small.xml"),
            "int8",
            given,
            smooth,
        )
        assert form == "onnx" or b"> <" not in b" ".join(small.read_bytes().split())  # no indentation
        answer = Program(read_program(small, ("logits",)), net.config)(**inputs).logits
        return float((answer - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    alone = sorted(error(share) for share in (0.95, 0.5))
    assert error(0.95, 0.5) == alone[0] < alone[1] and alone[0] < 0.1, alone
