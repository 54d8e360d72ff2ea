"""The Python API: what it makes of objects is what the commands make of files; mistakes are one line."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

import lit_compress as lc
from lit_compress.__main__ import main
from lit_compress.api import functions
from lit_compress.api.functions import _of_method, undisturbed
from lit_compress.methods.lpaf import LPAFSettings
from lit_compress.stages.base import Training

untyped: Any = lc  # takes the mistakes that the hints forbid

FEW = {"data.batch_size": 8, "calibration_examples": 24}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
        yield


@pytest.fixture(scope="module")
def net(tiny_backbone):
    return AutoModelForSequenceClassification.from_pretrained(tiny_backbone)


@pytest.fixture(scope="module")
def tokenizer(tiny_backbone):
    return AutoTokenizer.from_pretrained(tiny_backbone)


@pytest.fixture(scope="module")
def data(tiny_data):
    return DatasetDict({s: Dataset.from_json(str(tiny_data / f"{s}.jsonl")) for s in ("train", "validation")})


@pytest.fixture(scope="module")
def small(net, tokenizer, data):
    """A model that was factorized from objects; random numbers, warnings and the net are as before."""
    net.train()
    before, state, shown = copy.deepcopy(net.state_dict()), torch.get_rng_state(), warnings.formatwarning
    found = lc.factorize(net, tokenizer, data, density=0.5, task="sst2", **FEW)
    assert torch.equal(state, torch.get_rng_state()) and warnings.formatwarning is shown and net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.config.dtype is torch.float32
    return found


def test_it_writes_what_the_command_writes(small, tiny_backbone, tiny_data, tmp_path):
    words = [f"--{name}={value}" for name, value in FEW.items()]
    main(["factorize", str(tiny_backbone), str(tmp_path / "command"), "--data.task", "sst2", "--data.path",
          str(tiny_data), "--density", "0.5", *words])  # fmt: skip
    small.save_pretrained(tmp_path / "python")
    names = {path.name for path in (tmp_path / "command").iterdir()}
    assert names == {path.name for path in (tmp_path / "python").iterdir()} and "report.json" in names
    made, written = (load_file(tmp_path / out / "model.safetensors") for out in ("command", "python"))
    assert made.keys() == written.keys() and all(torch.equal(made[name], written[name]) for name in made)
    for name in ("structure.json", "modeling_compressed.py", "config.json", "tokenizer.json"):
        assert (tmp_path / "command" / name).read_text() == (tmp_path / "python" / name).read_text()
    report = json.loads((tmp_path / "command" / "report.json").read_text())
    for key in ("metric", "density", "params", "flops", "bytes", "interval"):
        assert small.report["compressed"][key] == report["compressed"][key]
    assert "| density" in str(small.report) and small.report._repr_markdown_().startswith("| SecondOrder on sst2")


def test_a_model_that_was_changed_is_saved_as_it_is(small, tmp_path, capsys):
    other = copy.deepcopy(small)
    with torch.no_grad():
        other.classifier.bias.add_(1)
    other.save_pretrained(tmp_path / "other")
    assert "the weights are not those that were measured" in capsys.readouterr().err
    assert not (tmp_path / "other" / "report.json").exists()
    again = lc.load(tmp_path / "other")
    assert torch.equal(again.classifier.bias, other.classifier.bias) and again.report == {}
    assert pickle.loads(pickle.dumps(small)).report == small.report
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(lc.UserError, match="holds something that is not an export"):
        small.save_pretrained(tmp_path / "full")
    with pytest.raises(lc.UserError, match="`hf upload USER/NAME FOLDER"):
        small.push_to_hub("me/small", private=True)


def test_scores_are_those_of_the_command(small, net, tokenizer, data, tiny_data, tmp_path, capsys):
    small.save_pretrained(tmp_path / "out")
    main(["validate", str(tmp_path / "out"), "--data.path", str(tiny_data)])
    said = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    said["val/rows"], _, said["val/available"] = said["val/rows"].split()
    with pytest.raises(lc.UserError, match=r"give it as data=\.\.\."):
        lc.evaluate(small, data)  # a compressed net has a tokenizer of its own
    for found in (lc.evaluate(small, data=data), lc.evaluate(tmp_path / "out", data=tiny_data)):
        assert {f"val/{name}": float(f"{value:.6f}") for name, value in found.items()} == {
            name: float(value) for name, value in said.items()
        }
    assert found["accuracy"] == small.report["compressed"]["metric"] and found["rows"] == 40
    net.eval().classifier.train()  # parts may have another mode
    rows = data["train"].rename_columns({"sentence": "review", "label": "stars"})
    with pytest.raises(lc.UserError, match=r"has no column 'text'; valid: review, stars"):
        lc.evaluate(net, tokenizer, rows, label="stars")
    found = lc.evaluate(net, tokenizer, rows, text="review", label="stars")
    assert (found["rows"], found["available"]) == (100, 100) and net.classifier.training > net.training
    some = lc.evaluate(net, tokenizer, rows, text="review", label="stars", **{"data.validation_examples": 30})
    assert (some["rows"], some["available"]) == (30, 100)
    batch = tokenizer(rows["review"][:], padding=True, return_tensors="pt")
    right = net(**batch).logits.argmax(-1) == torch.tensor(rows["stars"][:])
    assert found["accuracy"] == pytest.approx(right.float().mean().item())


def test_a_net_is_of_its_class_whatever_it_was_made_from(tiny_backbone, tokenizer):
    """Its configuration names the class of the file that it began with, until it is saved."""
    net = AutoModelForTokenClassification.from_pretrained(tiny_backbone, num_labels=3, ignore_mismatched_sizes=True)
    assert net.config.architectures == ["BertForSequenceClassification"]
    rows = Dataset.from_dict({"tokens": [["the", "film"], ["plot"]] * 4, "tags": [["A", "B"], ["C"]] * 4})
    assert lc.evaluate(net, tokenizer, rows).keys() >= {"word_accuracy", "rows"}
    assert net.config.architectures == ["BertForSequenceClassification"]


def test_the_same_objects_are_the_same_run(small, net, tokenizer, data, tmp_path, monkeypatch):
    """A call that is made again gives ``fit`` the same words, so that it goes on; the notebook makes a whole run."""
    got = []

    def run_fit(line):
        got.append(line)
        shutil.copytree(small.folder, tmp_path / "run" / "export", dirs_exist_ok=True)
        return None, small.report

    monkeypatch.setattr(functions, "run_fit", run_fit)
    method = lc.methods.SVD(density=0.5, retrain=Training(epochs=1))
    more = {"label": "label", "run_dir": tmp_path / "run", "data.batch_size": 16}
    made = lc.compress(net, tokenizer, data, method=method, fine_tuned=True, **more)
    assert made.folder == tmp_path / "run" / "export" and torch.equal(made.classifier.weight, small.classifier.weight)
    other = copy.deepcopy(net)
    for model in (other, net):
        lc.compress(model, tokenizer, DatasetDict(data), method=method, fine_tuned=True, **more)
        other.classifier.bias.data += 1
    lc.compress(other, tokenizer, data, method=method, **more)
    assert got[0] == got[1] == got[2] != got[3]
    found = [dict(line.options) | line.own for line in got]
    options = found[0]
    assert options["model.teacher"] == options["model.backbone"] and options["ckpt_path"] == "last"
    assert options["data.custom.label"] == "label" and options["model.retrain.epochs"] == 1
    assert options["trainer.devices"] == 1  # also on a machine with several, which would start this program again
    assert found[3]["model.backbone"] != options["model.backbone"] and found[3]["data.path"] == options["data.path"]
    assert "model.teacher" not in found[3]


def test_a_method_is_made_again_with_what_it_was_given():
    pruning = LPAFSettings(epochs=2)
    given = {"model": "LPAF", "model.density": 0.16, "model.prune.epochs": 2}
    assert _of_method(lc.methods.LPAF(density=0.16, prune=pruning)) == given
    assert _of_method("SVD") == _of_method(lc.methods.SVD) == {"model": "SVD"}
    assert _of_method(lc.methods.SVD(rank=3)) == {"model": "SVD", "model.rank": 3}


def test_adapters_and_quantized_nets_in_memory_are_one_line(net, tokenizer, data):
    """``save_pretrained`` would write the adapter alone, and integers in place of weights."""
    adapted, quantized = copy.deepcopy(net), copy.deepcopy(net)
    adapted._hf_peft_config_loaded = True
    quantized.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for call in (lc.factorize, lc.compress):
        with pytest.raises(lc.UserError, match=r"has a PEFT adapter, .*; merge it first \(merge_and_unload\(\)"):
            call(adapted, tokenizer, data)
        with pytest.raises(lc.UserError, match=r"is quantized \(bitsandbytes\); give the model in float"):
            call(quantized, tokenizer, data)
        with pytest.raises(lc.UserError, match="a SimpleNamespace is an adapter; merge it first"):
            call(SimpleNamespace(merge_and_unload=None), tokenizer, data)
    own = type("Own", (type(net),), {})(net.config)  # whose forward may be another one
    with pytest.raises(lc.UserError, match="model: Own is no class of transformers"):
        lc.factorize(own, tokenizer, data)
    found = lc.evaluate(quantized, tokenizer, data["validation"], task="sst2")  # its own answers need no file
    assert found == lc.evaluate(net, tokenizer, data["validation"], task="sst2")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda net, tok, data: lc.factorize(net, None, data), "tokenizer: it is missing"),
        (lambda net, tok, data: untyped.factorize(net, "bert", data), "tokenizer: a str is no fast tokenizer"),
        (lambda net, tok, data: lc.factorize(net, data), "tokenizer: a Dataset[A-Za-z]* is no .*; give it as data=..."),
        (
            lambda net, tok, data: untyped.factorize(torch.nn.Linear(1, 1), tok, data),
            "model: a Linear is no PreTrainedModel",
        ),
        (
            lambda net, tok, data: lc.factorize("nowhere/at/all", data=data),
            "model: no folder 'nowhere/at/all'",
        ),
        (lambda net, tok, data: lc.factorize(net, tok, data, density=1.5), r"1.5 is not in \(0, 1\]; nearest valid"),
        (lambda net, tok, data: lc.factorize(net, tok, data, densty=0.5), "unknown option 'densty'; did you mean"),
        (lambda net, tok, data: lc.factorize(net, tok), "data: it is missing; give a Dataset"),
        (lambda net, tok, data: untyped.compress(net, tok, data, method=3), "method: int is no method"),
        (
            lambda net, tok, data: untyped.compress(net, tok, data, **{"trainer.devices": 2}),
            "trainer.devices: 2: a function",
        ),
        (lambda net, tok, data: lc.compress(net, tok, data, method="LPAFF"), "unknown method 'LPAFF'; did you mean"),
        (
            lambda net, tok, data: lc.load("nowhere"),
            "load: cannot load the model 'nowhere' from the hub",
        ),
        (lambda net, tok, data: untyped.evaluate(net, tok, data, split="dev"), "split: unknown 'dev'"),
    ],
)
def test_mistakes_are_one_line(net, tokenizer, data, call, line):
    with pytest.raises(lc.UserError, match=line) as caught:
        call(net, tokenizer, data)
    assert "\n" not in str(caught.value)


def test_importing_loads_nothing_before_it_is_used():
    """And no random number is drawn when it is."""
    code = (
        "import random, sys, lit_compress as lc; state = random.getstate(); dir(lc); "
        "assert not {'torch', 'lightning', 'transformers'} & {*sys.modules}; lc.load; assert state == random.getstate()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'factorise'"):
        lc.factorise  # noqa: B018


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_gradients_reach_weights_in_any_mode(mode):
    with mode():
        threads = torch.get_num_threads()
        with undisturbed():
            torch.set_num_threads(threads + 1)
            weight = torch.ones(2, requires_grad=True)
            (2 * weight).sum().backward()
        assert not torch.is_grad_enabled() and torch.get_num_threads() == threads
    assert weight.grad.tolist() == [2.0, 2.0]
