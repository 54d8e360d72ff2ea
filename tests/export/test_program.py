"""The net as a graph of ONNX or OpenVINO: the same logits for any batch and length, or one line that says no."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import transformers
from helpers import Tokenizer, as_deployed, gated, narrow, net_of
from largest import largest_tensor
from moments import decompose
from tiny import make_net

import lit_compress
from lit_compress.export import program
from lit_compress.export.program import write_program
from lit_compress.layers import (
    LowRankLinear,
    LowRankRowsLinear,
    LowRankSparseLinear,
    NarrowLinear,
    NarrowNorm,
    Removed,
    SizedNorm,
)
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

PAIRS = Tokenizer("token_type_ids")


def factors(net):
    """Factors at most sites, factors and rows at some."""
    sites = [site.name for site in find_sites(net)]
    factorize(net, dict.fromkeys(sites[2:], 5), lambda _, w, r: decompose(w, r))
    factorize(net, dict.fromkeys(sites[:2], 2), lambda _, w, r: decompose(w, r), LowRankSparseLinear)
    with torch.no_grad():
        for name in sites[:2]:
            net.get_submodule(name).sparse[::3] = 0
            net.get_submodule(name).sparse[1::3] = 0
    return net


CASES = {
    "factors": ("roberta", {}, factors, (LowRankLinear, LowRankRowsLinear)),
    "gated": ("bert", {"num_hidden_layers": 4}, gated, (SizedNorm, Removed)),
    "narrow": ("albert", {}, narrow, (NarrowLinear,)),
    "narrow_bert": ("bert", {}, narrow, (NarrowNorm,)),
}


def compressed(case):
    family, settings, make, layers = CASES[case]
    net = as_deployed(make(net_of(family, torch.float32, **settings)))
    assert set(layers) <= {type(module) for module in net.modules()}
    return net


def one_text(names):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 100, (1, 29), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(29) < 20).long()[None], "token_type_ids": ids % 2}
    return {name: inputs[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "narrow" else pytest.mark.slow) for c in CASES])
def test_onnx(case, tmp_path):
    """On one text that it never saw."""
    net, runtime = compressed(case), pytest.importorskip("onnxruntime")
    found = write_program(net, PAIRS, tmp_path, "onnx")
    assert program.program_bytes(tmp_path / "model.onnx") == found["bytes"] and found["outputs"] == ["logits"]
    inputs = one_text(found["inputs"])
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    assert torch.allclose(torch.from_numpy(logits), net(**inputs).logits, atol=1e-4)
    assert session.get_inputs()[0].shape == ["batch", "length"]
    for place in (lit_compress, transformers):  # paths of where it was made
        assert place.__file__.rpartition("/")[0].encode() not in (tmp_path / "model.onnx").read_bytes()


@pytest.mark.slow
def test_a_net_that_writes_gives_logits(tmp_path):
    pytest.importorskip("onnxruntime")
    found = write_program(make_net("bart", "xsum"), Tokenizer(), tmp_path, "onnx")
    assert found["inputs"] == ["input_ids", "attention_mask", "decoder_input_ids"] and found["difference"] <= 1e-4


def test_nets_that_cannot_be_followed_are_one_line(tmp_path, monkeypatch):
    def export(*args, **kwargs):
        raise RuntimeError("\x1b[31mno way\x1b[0m through\na branch")

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(UserError, match=r"onnx cannot write BertFor.* \(bert\), --format hf can; no way through$"):
        write_program(make_net("bert"), PAIRS, tmp_path, "onnx")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(torch.export, "export", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):  # which no other format mends
        write_program(make_net("bert"), PAIRS, tmp_path, "onnx")


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_other_logits_are_refused(value, tmp_path, monkeypatch):
    net = make_net("bert").eval()

    def run(given):
        return {"logits": net(**given).logits + value}

    monkeypatch.setattr(program, "_write_onnx", lambda module, inputs, path: None)
    monkeypatch.setattr(program, "read_program", lambda path, results: run)
    with pytest.raises(UserError, match=r"the logits of model.onnx differ by (1\.00e-02|nan), more than 1e-04;"):
        write_program(net, PAIRS, tmp_path, "onnx")


def test_the_probe_has_padding_and_two_parts():
    inputs = program.example_inputs(make_net("bert"), PAIRS, 3, 11)
    assert [row.sum() for row in inputs["attention_mask"]] == [11, 5, 11]
    assert inputs["token_type_ids"].unique().tolist() == [0, 1] and not inputs["input_ids"].lt(0).any()
    assert "token_type_ids" not in program.example_inputs(make_net("distilbert"), PAIRS, 1, 11)
    inputs = program.example_inputs(make_net("gemma3_text"), Tokenizer(), 3, 11)  # its head reads the last real token
    assert ((inputs["input_ids"] == 1) == (inputs["attention_mask"] == 0)).all()
    inputs = program.example_inputs(make_net("bart"), Tokenizer(), 3, 11)
    assert ((inputs["input_ids"] == 2).sum(dim=1) == 1).all()  # one end in every text, as BART's head needs


def test_one_text_at_a_time():
    """Logits over a vocabulary are compared without a copy of those of all texts; padding does not count."""
    kind = task_type(get_task("wikitext2"))
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    expected = torch.randn(3, 8, 50) * 3
    answered = {"logits": expected.clone()}
    answered["logits"][1, 6] += 100
    answered["logits"][2, 3, 4] += 0.5
    with largest_tensor() as largest:
        found = program.farthest(kind, lambda _: answered, [{"attention_mask": mask}], [{"logits": expected}])
    assert largest() <= 8 * 50
    assert found == pytest.approx(0.5 / float(expected[mask.bool()].abs().max()), rel=1e-4)


WINDOWS = [
    ("gemma3_text", "sst2"),
    ("modernbert", "conll2003"),
    ("modernbert", "squad"),
    ("modernbert", "stsb_embedding"),
]


def saved_net(family, task):
    """A net whose configuration names its class, as that of a saved one does."""
    net = net_of(family, torch.float32, task=task).eval()
    net.config.architectures = [type(net).__name__]
    return net


@pytest.mark.parametrize(("family", "task"), [*WINDOWS, ("llama", "wikitext2")])
def test_only_what_is_at_padding_may_differ(family, task, tmp_path, monkeypatch):
    net, kind = saved_net(family, task), task_type(get_task(task))

    def run(given, at=0):
        output = net(**given)
        results = kind.gives(output, given)
        if not kind.per_token:
            return results
        places = (given["attention_mask"] == at)[(...,) + (None,) * (output[kind.results[0]].ndim - 2)]
        return results | {name: results[name].masked_fill(places, torch.nan) for name in kind.results}

    monkeypatch.setattr(program, "_write_onnx", lambda module, inputs, path: None)
    monkeypatch.setattr(program, "read_program", lambda path, results: run)
    assert write_program(net, Tokenizer(), tmp_path, "onnx")["difference"] == 0
    monkeypatch.setattr(program, "read_program", lambda path, results: partial(run, at=1))
    if kind.per_token:
        with pytest.raises(UserError, match="differ by nan"):
            write_program(net, Tokenizer(), tmp_path, "onnx")
