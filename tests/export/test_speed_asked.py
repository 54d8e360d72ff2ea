"""Where a speed-up is measured, and what is timed there."""

from dataclasses import replace
from types import SimpleNamespace

import processes
import pytest
import torch
from tiny import make_net

from lit_compress.export import speed_asked as speed
from lit_compress.export.choices import AS_IS, Choices
from lit_compress.export.runtimes import RUNTIMES
from lit_compress.export.speed_asked import Programs, find_place, slowest
from lit_compress.models.budget import parse_budget
from lit_compress.models.surgery import with_random_values, without_values
from lit_compress.utils.errors import UserError


@pytest.fixture(scope="module")
def dense():
    net = make_net("bert")
    return without_values(lambda: type(net)(net.config))


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr("lit_compress.export.runtimes.find_spec", lambda name: True)
    monkeypatch.setattr("lit_compress.export.choices.find_spec", lambda name: True)


def missing(monkeypatch, *packages):
    monkeypatch.setattr("lit_compress.export.runtimes.find_spec", lambda name: None if name in packages else True)


def place(asked, net, choices=AS_IS):
    return find_place(parse_budget(asked), choices, net, 12)


def test_a_named_place(dense, all_installed):
    found = place("speedup=5x@openvino-int8,8x16,1x4", dense)
    assert (found.runtime, found.shapes) == ("openvino-int8", ((8, 16), (1, 4)))
    assert (found.choices.format, found.choices.dtype) == ("openvino", "int8")
    assert str(found) == "openvino-int8, 8 x 16 and 1 x 4 tokens"


def test_the_fastest_that_is_installed_at_one_text_and_32(dense, all_installed, monkeypatch):
    found = place("speedup=3x", dense)
    assert found.runtime == "openvino-int8" and found.shapes == ((1, 12), (32, 12))
    missing(monkeypatch, "openvino")
    assert place("speedup=3x", dense).runtime == "onnx-int8"
    missing(monkeypatch, "openvino", "onnxruntime")
    found = place("speedup=3x", dense)
    assert found.runtime == "eager" and found.choices == AS_IS


def test_the_program_that_is_written_anyway(dense, all_installed):
    for form, dtype, runtime in (("onnx", "int8", "onnx-int8"), ("onnx", "float32", "openvino"),
                                 ("openvino", "float32", "openvino")):  # fmt: skip
        choices = Choices(format=form, dtype=dtype)
        assert place("speedup=3x", dense, choices) == speed.Place(runtime, ((1, 12), (32, 12)), choices)


@pytest.mark.parametrize(
    ("asked", "choices", "words"),
    [
        ("speedup=5x@openvino-int9", {}, "unknown runtime 'openvino-int9'; did you mean 'openvino-int8'?"),
        ("speedup=5x@onnx-int8", {"format": "openvino", "dtype": "int8"}, "nearest: --format onnx --dtype int8"),
        ("speedup=5x@openvino", {"dtype": "bfloat16"}, "is for openvino, and --format hf --dtype bfloat16 is not;"),
        (
            "speedup=5x",
            {"format": "openvino", "dtype": "int4"},
            "--dtype int4 is not; nearest: --format",
        ),
        ("speedup=5x@onnx,1x99", {}, "texts of 99 tokens, more than the model reads; the largest is 64"),
    ],
)
def test_what_is_refused(asked, choices, words, dense, all_installed):
    with pytest.raises(UserError) as stop:
        place(asked, dense, Choices(**choices))
    assert str(stop.value).startswith(f"model.budget: '{asked}'") and words in str(stop.value)


def test_what_is_not_installed(dense, all_installed, monkeypatch):
    missing(monkeypatch, "openvino")
    with pytest.raises(UserError, match=r"is not installed; pip install openvino, or nearest here: onnx-int8$"):
        place("speedup=5x@openvino-int8", dense)


def test_random_values_leave_a_net_that_has_some():
    net = make_net("bert")
    assert with_random_values(net) is net
    small = with_random_values(without_values(lambda: type(net)(net.config)))
    assert all(0 < value.abs().max() < 1 for value in small.parameters())
    assert small.training is False and torch.equal(*(with_random_values(without_values(lambda: type(net)(
        net.config))).classifier.weight for _ in range(2)))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["eager", "onnx"])
def test_programs_take_turns(runtime, dense, monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 3)
    monkeypatch.setattr(speed, "LEAST", 3)
    found = place(f"speedup=2x@{runtime},1x8,3x12", dense)
    net = make_net("bert", num_hidden_layers=1)
    timed = Programs(dense, lambda text: {}, found)
    gains = timed.gains(without_values(lambda: type(net)(net.config)))
    assert [(gain["batch"], gain["length"], gain["rounds"]) for gain in gains] == [(1, 8, 3), (3, 12, 3)]
    assert all(gain["low"] <= gain["median"] <= gain["high"] and gain["ms"] > 0 for gain in gains)
    assert slowest(gains) == min(gain["median"] for gain in gains)


def test_an_export_s_own_program_is_timed(dense, tmp_path, monkeypatch):
    loaded = []
    fake = replace(RUNTIMES["onnx"], load=lambda path, setting: loaded.append(path) or (lambda inputs: []))
    monkeypatch.setitem(RUNTIMES, "onnx", fake)
    monkeypatch.setattr(speed, "write_program", lambda *_: {"file": "model.onnx"})
    timed = Programs(dense, lambda text: {}, place("speedup=2x@onnx,1x8", dense))
    timed.speed_of(SimpleNamespace(), tmp_path / "export.onnx")
    assert loaded[1:] == [tmp_path / "export.onnx"]


def on_an_accelerator() -> dict:
    """Return what a search times on the second device."""
    import second_device

    second_device.start()
    net = make_net("bert")
    budget = parse_budget("speedup=2x@second,2x8")
    assert budget
    found = find_place(budget, AS_IS, net, 12)
    gains = Programs(net, lambda text: {}, found).speed_of(net, None)["shapes"]
    return {"place": (found.runtime, found.device), "text": str(found), "ms": gains[0]["ms"], "device": str(net.device),
            "dtype": str(net.dtype)}  # fmt: skip


@pytest.mark.slow
def test_an_accelerator_is_timed_in_16_bits_and_the_export_stays_where_it_is():
    told = processes.on_second_device(on_an_accelerator)
    assert told["place"] == ("eager", "second") and told["text"] == "eager on second, 2 x 8 tokens"
    assert told["ms"] > 0 and (told["device"], told["dtype"]) == ("cpu", "torch.float32")


@pytest.mark.parametrize("name", ["cuda", "graphs"])
def test_an_accelerator_that_is_not_here(name, dense):
    with pytest.raises(UserError, match=f"accelerator '{name}', and this machine has none; nearest here: eager"):
        place(f"speedup=2x@{name},2x8", dense)


def test_programs_do_not_run_on_an_accelerator(dense, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    with pytest.raises(UserError, match="--format onnx --dtype int8 is not; nearest: --format hf --dtype bfloat16"):
        place("speedup=2x@cuda,2x8", dense, Choices(format="onnx", dtype="int8"))
    assert place("speedup=2x@cuda,2x8", dense).runtime == "graphs"
