"""Models with code of their own: it runs only if it is trusted, and goes wherever the net goes."""

import json
import os
import shutil

import pytest
import torch
from hub import as_a_new_process
from mistakes import configure, fails, fit
from transformers import AutoModelForSequenceClassification

import lit_compress as lc
from lit_compress.__main__ import main

# a BERT whose logits are doubled, with a configuration of its own in another file; and a tokenizer that reads backwards
CONFIG = """
import os
from pathlib import Path

from transformers import BertConfig

Path(os.environ["RAN"]).touch()


class DoubledConfig(BertConfig):
    model_type = "bert"
    factor = 2.0
"""
NET = """
from transformers import BertForSequenceClassification

from .configuration_doubled import DoubledConfig


class DoubledForSequenceClassification(BertForSequenceClassification):
    config_class = DoubledConfig

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, token_type_ids, labels=labels, **kwargs)
        output.logits = output.logits * self.config.factor
        return output
"""
WORDS = """
from transformers import BertTokenizerFast


class BackwardsTokenizerFast(BertTokenizerFast):
    def __call__(self, text, *args, **kwargs):
        text = text[::-1] if isinstance(text, str) else [one[::-1] for one in text]
        return super().__call__(text, *args, **kwargs)
"""
AUTO_MAP = {
    "AutoConfig": "configuration_doubled.DoubledConfig",
    "AutoModelForSequenceClassification": "modeling_doubled.DoubledForSequenceClassification",
}
LABELS = {"id2label": {"0": "negative", "1": "positive"}, "label2id": {"negative": 0, "positive": 1}}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that the code of the model makes when it runs."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return tmp_path / "ran"


@pytest.fixture
def own(tiny_backbone, tmp_path, ran):
    """A fine-tuned model with code of its own."""
    folder = shutil.copytree(tiny_backbone, tmp_path / "own")
    (folder / "configuration_doubled.py").write_text(CONFIG)
    (folder / "modeling_doubled.py").write_text(NET)
    configure(folder, auto_map=AUTO_MAP, architectures=["DoubledForSequenceClassification"], **LABELS)
    return folder


def options(tiny_data):
    return ["--data.task", "sst2", "--data.path", str(tiny_data), "--device", "cpu"]


def with_own(short_run, own):
    words = ["1" if word == "2" else word for word in short_run]
    words[words.index("--model.backbone") + 1] = str(own)
    return words


@pytest.mark.slow
def test_an_export_has_the_code_and_computes_what_it_computes(own, ran, tiny_data, tmp_path, capsys):
    out, data = tmp_path / "out", options(tiny_data)
    words = ["--weighting", "none", "--rank_ratio", "1.0", "--trust_remote_code"]
    main(["factorize", str(own), str(out), *words, *data])
    assert {"configuration_doubled.py", "modeling_doubled.py", "modeling_compressed.py"} <= set(os.listdir(out))
    nets = (
        lc.load(out, trust_remote_code=True),
        AutoModelForSequenceClassification.from_pretrained(own, trust_remote_code=True).eval(),
    )
    with torch.inference_mode():
        small, dense = (net(torch.arange(5, 15)[None]).logits for net in nets)
    torch.testing.assert_close(small, dense, atol=1e-4, rtol=1e-4)  # BERT of transformers answers half
    assert json.loads((out / "report.json").read_text())["export_difference"] <= 1e-5  # to a process without ours
    capsys.readouterr()
    ran.unlink()
    # an export may be of somebody else: what its report says is no permission
    assert "--trust_remote_code runs it" in fails(capsys, "validate", out)
    assert "--trust_remote_code runs it" in fails(capsys, "bench", out, "--runtimes", "eager")
    with pytest.raises(lc.UserError, match="--trust_remote_code runs it"):
        lc.load(out)
    with pytest.raises(lc.UserError, match="--trust_remote_code runs it"):
        lc.evaluate(str(out))
    assert not ran.exists()
    assert "trust_remote_code=True" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_run_keeps_code_and_no_permission(own, ran, hub, short_run, tmp_path, capsys, monkeypatch):
    """By name: the code is the commit's, and a run needs no hub again. The option is each command's own."""
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    hub.add("me/own", files)
    out = tmp_path / "run"
    main([*fit(with_own(short_run, "me/own"), out), "--trust_remote_code", "--model.dense.epochs", "1"])
    assert {"configuration_doubled.py", "modeling_doubled.py"} <= set(os.listdir(out / "dense" / "net"))
    assert "trust_remote_code: true" in (out / "config.yaml").read_text()
    hub.add("me/own", files | {"modeling_doubled.py": b"raise SystemExit('another commit was run')"})
    hub.close()
    as_a_new_process()
    before = json.loads((out / "report.json").read_text())["compressed"]["metric"]
    for words in (["export", out, tmp_path / "again"], ["validate", out]):
        assert "--trust_remote_code runs it" in fails(capsys, *words)
    main(["export", str(out), str(tmp_path / "again"), "--trust_remote_code"])
    assert json.loads((tmp_path / "again" / "report.json").read_text())["compressed"]["metric"] == before


def test_a_tokenizer_with_code(tiny_backbone, tiny_data, tmp_path, capsys):
    """Without trust its file is read alone, and a note says so; with it the export has the code."""
    from transformers import AutoTokenizer

    folder, data = shutil.copytree(tiny_backbone, tmp_path / "own"), options(tiny_data)
    configure(folder, **LABELS)
    (folder / "tokenization_own.py").write_text(WORDS)
    configure(
        folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.BackwardsTokenizerFast"]}
    )
    words, text = ["--weighting", "none", "--rank_ratio", "0.5", *data], "a film"
    for name, trust in (("plain", []), ("trusted", ["--trust_remote_code"])):
        main(["factorize", str(folder), str(tmp_path / name), *words, *trust])
        told = "tokenization_own.py) is not run" in capsys.readouterr().err
        ids = AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=True)(text)["input_ids"]
        dense = AutoTokenizer.from_pretrained(folder, trust_remote_code=bool(trust))(text)["input_ids"]
        assert ids == dense and told != bool(trust)
        assert (tmp_path / name / "tokenization_own.py").exists() == bool(trust)
        shown = (
            "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)"
            in (tmp_path / name / "README.md").read_text()
        )
        assert shown == bool(trust)
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != dense


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AutoConfig": "me/other--configuration_doubled.DoubledConfig"}, "in the repository 'me/other'"),
        (
            {"AutoModelForSequenceClassification": None, "AutoModel": "modeling_doubled.Net"},
            "no class for AutoModelFor",
        ),
        ({"AutoConfig": "missing.Config"}, "missing.py"),
    ],
)
def test_code_that_cannot_be_used_is_one_line(change, words, own, tiny_data, tmp_path, capsys):
    configure(own, auto_map={name: ref for name, ref in (AUTO_MAP | change).items() if ref})
    command = ["factorize", own, tmp_path / "out", "--trust_remote_code", *options(tiny_data)]
    assert words in fails(capsys, *command) and not (tmp_path / "out").exists()


def test_a_class_that_transformers_took_over_needs_no_code(own, ran, tiny_data, tmp_path, capsys):
    """As that of Phi-3; no file of the export names code that is not in it."""
    named = {"AutoConfig": "BertConfig", "AutoModelForSequenceClassification": "BertForSequenceClassification"}
    named = {name: f"configuration_doubled.{ref}" for name, ref in named.items()}
    configure(own, auto_map=named)
    main(["factorize", str(own), str(tmp_path / "out"), "--density", "1.0", "--weighting", "none", *options(tiny_data)])
    assert "(configuration_doubled.py) is not run; transformers has the class BertConfig" in capsys.readouterr().err
    assert "doubled" not in (tmp_path / "out" / "config.json").read_text() and not ran.exists()
