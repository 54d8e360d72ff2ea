"""What is timed, what is refused, and what is kept: real nets of a few weights, made-up runtimes and times."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import make_net
from torch import nn

from lit_compress.export import bench as module
from lit_compress.export.bench import BenchedNet, Settings, bench
from lit_compress.export.modelling import write_model
from lit_compress.export.runtimes import RUNTIMES, Runtime, Setting, _blocks, torch_runner
from lit_compress.layers import LowRankLinear
from lit_compress.models.surgery import replace as replace_module
from lit_compress.utils.errors import UserError

OLD = Path(__file__).resolve().parents[1] / "old_runs" / "lpaf"
NETS = {"dense": OLD / "dense" / "net", "compressed": OLD / "export"}
FEW = Settings(batches=(8, 1), lengths=(16, 8), rounds=3, runtimes=("eager",))


def made_up(monkeypatch, name, change=lambda result: result, before=lambda inputs: None, **values):
    """Add a runtime that does what PyTorch does, and something to its results."""

    def load(given, setting):  # a model, or its folder in place of a program
        eager = RUNTIMES["eager"].load(given if isinstance(given, nn.Module) else module._load(given), setting)

        def run(inputs):
            before(inputs)
            return [change(result) for result in eager(inputs)]

        return run

    monkeypatch.setitem(RUNTIMES, name, Runtime(name, values.pop("packages", ("torch",)), load, **values))


def nan_of_several(result):
    return result * float("nan" if len(result) > 1 else 1)


def test_a_dense_and_a_compressed_net():
    seen = []
    result = bench(NETS, replace(FEW, lengths=(16, 8, 11)), lambda found: seen.append(len(found["shapes"])))
    shapes = [(shape["batch"], shape["length"]) for shape in result["shapes"]]
    assert shapes == [(1, 8), (1, 11), (1, 16), (8, 8), (8, 11), (8, 16)]  # the cheapest first
    assert seen == [1, 2, 3, 4, 5, 6] and result["asked"] == 6
    for shape in result["shapes"]:
        dense, small = shape["times"]
        assert (dense["net"], small["net"]) == ("dense", "compressed") and shape["rounds"] == 3
        assert 0 < dense["p10"] <= dense["median"] <= dense["p90"] and "over_dense" not in dense
        assert small["over_dense"]["low"] <= small["over_dense"]["median"] <= small["over_dense"]["high"]
    assert [entry["net"] for entry in result["programs"]] == ["dense", "compressed"]
    assert result["threads"] == result["hardware"]["threads"] == 1 and "torch" in result["versions"]
    json.dumps(result)


def test_code_of_a_stranger_is_not_run(tmp_path):
    """Of an export no code is run, but this package's layers; a model with code of its own is refused."""
    layer = (net := make_net("bert").eval()).bert.encoder.layer[0].output.dense
    replace_module(net, "bert.encoder.layer.0.output.dense", LowRankLinear.from_factors(
        layer, *(factor.detach() for factor in (layer.weight[:, :4], layer.weight[:4]))))  # fmt: skip
    write_model(net, tmp_path)
    code, config, ran = tmp_path / "modeling_compressed.py", tmp_path / "config.json", tmp_path / "ran"
    code.write_text(code.read_text() + f"open({str(ran)!r}, 'w')\n")
    assert bench({"compressed": tmp_path}, FEW)["shapes"]
    (tmp_path / "other_compressed.py").write_text(code.read_text())
    config.write_text(config.read_text().replace("modeling_", "other_"))
    with pytest.raises(UserError, match=r"code of its own \(other_compressed.py\), which is"):
        bench({"compressed": tmp_path}, FEW)
    assert not ran.exists()


@pytest.mark.slow
def test_the_program_of_8_bits_that_an_export_has(tmp_path):
    """It is what int8 means; one of float32 is written for the measurement."""
    folder, work = tmp_path / "export", tmp_path / "work"
    shutil.copytree(OLD / "export", folder)
    work.mkdir()
    (folder / "model.onnx").write_bytes(b"8 bits")
    (folder / "report.json").write_text(json.dumps({"program": {"dtype": "int8"}}))
    source = BenchedNet("compressed", folder, FEW, work)
    (source.work / "float32").mkdir()
    for name in ("model.onnx", "openvino_model.xml"):
        (source.work / "float32" / name).write_bytes(b"32 bits")
    assert source.file("onnx", "int8").read_bytes() == b"8 bits"
    assert source.file("onnx", "float32").read_bytes() == b"32 bits"
    with pytest.raises(UserError, match="needs training texts"):
        source.file("openvino", "int8")
    (folder / "report.json").write_text(json.dumps({"program": {"dtype": "int8", "file": "openvino_model.xml"}}))
    (folder / "openvino_model.xml").write_bytes(b"8 bits of another runtime")
    (other := tmp_path / "other").mkdir()
    source = BenchedNet("compressed", folder, FEW, other)
    assert source.file("openvino", "int8").read_bytes() == b"8 bits of another runtime"
    (folder / "report.json").write_text("{}")
    (plain := tmp_path / "plain").mkdir()
    assert BenchedNet("compressed", folder, FEW, plain).file("onnx", "float32").read_bytes() == b"8 bits"


def test_a_shape_by_hand(monkeypatch):
    """Speed-ups are of the same round, over the dense net in the same runtime."""
    sources = [SimpleNamespace(label=net, inputs=lambda *shape: {}) for net in ("dense", "compressed")]
    programs = [SimpleNamespace(source=source, runtime=RUNTIMES[name], run=len)
                for source in sources for name in ("eager", "onnx")]  # fmt: skip
    drift = np.array([1.0, 3.0, 2.0, 1.0, 5.0])
    monkeypatch.setattr(module, "in_turns", lambda *_, **__: [list(drift * factor) for factor in (8, 6, 4, 3)])
    entry = module._measure_shape(programs, 2, 16, FEW)
    found = {(e["net"], e["runtime"]): e for e in entry["times"]}
    assert "over_dense" not in found["dense", "onnx"]
    assert found["compressed", "onnx"]["over_dense"] == {
        "median": 2.0, "low": 2.0, "high": 2.0, "verdict": "faster"
    }  # fmt: skip
    assert not found["dense", "eager"]["steady"] and entry["rounds"] == 5


def test_what_differs_or_is_not_there_is_not_timed(monkeypatch):
    made_up(monkeypatch, "wrong", lambda result: result + 0.01)
    made_up(monkeypatch, "nothing", lambda result: result * float("nan"))
    made_up(monkeypatch, "near", lambda result: result + 0.01, tolerance=0.1)
    made_up(monkeypatch, "absent", packages=("torch", "no_such_package"))
    result = bench(NETS, replace(FEW, batches=(1,), runtimes=("wrong", "nothing", "near", "absent")))
    assert {entry["runtime"] for entry in result["shapes"][0]["times"]} == {"near"}
    assert result["programs"][0]["difference"] == pytest.approx(0.01, rel=1e-2)
    assert [(left["what"], left["why"]) for left in result["left_out"]] == [
        ("wrong of the dense model", "its results differ from PyTorch's by 1.0e-02, more than 1e-04"),
        ("nothing of the dense model", "its results differ from PyTorch's by nan, more than 1e-04"),
        ("absent", "not installed; pip install no_such_package"),
        ("wrong of the compressed model", "its results differ from PyTorch's by 1.0e-02, more than 1e-04"),
        ("nothing of the compressed model", "its results differ from PyTorch's by nan, more than 1e-04"),
    ]
    with pytest.raises(UserError, match="no runtime is left; absent: not installed; pip install no_such_package"):
        bench(NETS, replace(FEW, runtimes=("absent",)))


def test_a_program_of_integers_that_is_far_off_is_shown_and_marked(monkeypatch):
    """The dense int8 program of MiniLM is off by more than a quarter of its largest result, and answers as well."""
    small = {"form": "onnx", "dtype": "int8", "tolerance": 0.25}
    made_up(monkeypatch, "int8", lambda result: result + 3, **small)
    made_up(monkeypatch, "int8, near", lambda result: result + 0.01, **small)
    made_up(monkeypatch, "int8, broken", nan_of_several, **small)
    monkeypatch.setattr(BenchedNet, "file", lambda source, form, dtype: source.folder)
    few = replace(FEW, batches=(1,), runtimes=("eager", "int8, near", "int8, broken", "int8"))
    result = bench({"compressed": NETS["dense"]}, few, data=SimpleNamespace)
    assert [left["what"] for left in result["left_out"]] == ["int8, broken of the compressed model"]
    assert [entry["far"] for entry in result["programs"]] == [False, False, True]
    assert result["programs"][2]["difference"] > 0.25
    assert len(result["shapes"][0]["times"]) == 3


def test_a_net_without_a_tokenizer_and_lengths_that_it_does_not_read(tmp_path):
    make_net("distilbert").save_pretrained(tmp_path)
    result = bench({"compressed": tmp_path}, replace(FEW, lengths=(16, 99, 65)))
    assert {shape["length"] for shape in result["shapes"]} == {16}
    assert [left["what"] for left in result["left_out"]] == ["length 65", "length 99"]
    assert all("over_dense" not in entry for shape in result["shapes"] for entry in shape["times"])
    with pytest.raises(UserError, match="length: 65 is more than the model reads; the largest is 64"):
        bench({"compressed": tmp_path}, replace(FEW, lengths=(65,)))


@pytest.mark.parametrize("task", ["conll2003", "stsb_embedding"])
def test_models_of_different_tasks_are_not_compared(task, tmp_path):
    make_net("distilbert", task).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"bench: '.*net' is for classification, '{tmp_path}' for .* same task"):
        bench({"dense": NETS["dense"], "compressed": tmp_path}, FEW)


@pytest.mark.slow
def test_onnx_in_float32_and_int8_beside_pytorch_in_16_bits(monkeypatch):
    pytest.importorskip("onnxruntime")
    ids = np.random.default_rng(0).integers(5, 60, (16, 24))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    settings = replace(FEW, runtimes=("eager", "onnx", "onnx-int8"), dtype="bfloat16", batches=(1,), lengths=(8,))
    monkeypatch.setattr(module, "training_feeds", lambda *_: [feed])
    result = bench({"compressed": OLD / "export"}, settings, data=lambda: SimpleNamespace(read_as=str))
    assert result["left_out"] == [] and "onnxruntime" in result["versions"]
    half, full, small = result["programs"]
    assert [entry["dtype"] for entry in (half, full, small)] == ["bfloat16", "float32", "int8"]
    assert 1e-4 < full["difference"] <= 0.1 and not full["far"], "16 bits, no integers, make the difference"
    assert 0 < small["difference"] <= 0.25 and small["bytes"] < full["bytes"]


def test_in_16_bits_a_model_has_what_its_file_would_have():
    net = make_net("llama")
    run = torch_runner(net, Setting(("logits",), dtype="bfloat16"))
    assert net.score.weight.dtype == torch.bfloat16
    assert net.model.rotary_emb.inv_freq.dtype == torch.float32, "no file has it, and loading leaves it"
    ids = np.arange(12).reshape(2, 6)
    assert run({"input_ids": ids, "attention_mask": np.ones_like(ids)})[0].dtype == torch.bfloat16


def test_a_shape_that_does_not_fit_ends_the_measurement(monkeypatch):
    inner, shapes = module._measure_shape, []

    def measure(programs, batch, length, settings):
        shapes.append((batch, length))
        if len(shapes) == 2:
            raise torch.OutOfMemoryError("too much")
        return inner(programs, batch, length, settings)

    monkeypatch.setattr(module, "_measure_shape", measure)
    kept = []
    result = bench(NETS, FEW, keep=lambda so_far: kept.append(list(so_far["left_out"])))
    batch, length = shapes[1]
    assert kept[-1] == result["left_out"], "what is written has the reason"
    assert len(result["shapes"]) == 1 and len(shapes) == 2 < result["asked"]
    assert {"what": f"{batch} x {length} and larger", "why": "not enough memory"} in result["left_out"]


def test_the_largest_list_of_modules_is_compiled_block_by_block():
    lists = [nn.ModuleList([nn.Linear(width, width) for _ in range(2)]) for width in (3, 4, 2)]
    net = nn.Sequential(nn.Linear(9, 9), *lists, nn.ModuleList())
    assert _blocks(net) == list(lists[1])
    assert _blocks(net[0]) == [net[0]]
