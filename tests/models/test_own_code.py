"""Models with code of their own: it never runs, and nothing that is written names it."""

import shutil

import pytest
from mistakes import configure, fails, fit
from transformers import AutoTokenizer

import lit_compress as lc
from lit_compress.__main__ import main

# a configuration of its own, in a file that notes that it ran
CONFIG = """
import os
from pathlib import Path

from transformers import BertConfig

Path(os.environ["RAN"]).touch()


class DoubledConfig(BertConfig):
    model_type = "bert"
    factor = 2.0
"""
AUTO_MAP = {
    "AutoConfig": "configuration_doubled.DoubledConfig",
    "AutoModelForSequenceClassification": "modeling_doubled.DoubledForSequenceClassification",
}
LABELS = {"id2label": {"0": "negative", "1": "positive"}, "label2id": {"negative": 0, "positive": 1}}
REFUSED = r"has code of its own \(configuration_doubled.py\), which is not run; give a model whose class transformers"


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
    configure(folder, auto_map=AUTO_MAP, architectures=["DoubledForSequenceClassification"], **LABELS)
    return folder


def options(tiny_data):
    return ["--data.task", "sst2", "--data.path", str(tiny_data), "--device", "cpu"]


@pytest.mark.parametrize("model_type", ["bert", "doubled"])
def test_every_command_refuses_it(model_type, own, ran, short_run, tiny_data, tmp_path, capsys):
    configure(own, model_type=model_type)
    data, out = options(tiny_data), tmp_path / "out"
    words = [
        ["factorize", own, out, *data], fit([*short_run, "--model.backbone", str(own)], out),
        ["validate", own, *data], ["bench", own, "--runtimes", "eager", "--output", tmp_path / "times"],
    ]  # fmt: skip
    for command in words:
        line = fails(capsys, *command)
        assert "configuration_doubled.py), which is not run; give a model whose class transformers has" in line
    for call in (
        lambda: lc.factorize(str(own), data=str(tiny_data), task="sst2", density=0.5),
        lambda: lc.evaluate(str(own), data=str(tiny_data), task="sst2"),
    ):
        with pytest.raises(lc.UserError, match=REFUSED):
            call()
    assert not ran.exists() and not out.exists()


def test_the_code_of_a_tokenizer_is_neither_run_nor_kept(tiny_backbone, tiny_data, ran, tmp_path, capsys):
    """Its file is read alone, and a note says so."""
    folder = shutil.copytree(tiny_backbone, tmp_path / "own")
    configure(folder, **LABELS)
    expected = AutoTokenizer.from_pretrained(folder)("a film")["input_ids"]
    (folder / "tokenization_own.py").write_text(CONFIG)
    configure(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.DoubledConfig"]})
    main(["factorize", str(folder), str(tmp_path / "out"), "--weighting", "none", "--rank_ratio", "0.5",
          *options(tiny_data)])  # fmt: skip
    assert "tokenization_own.py) is not run" in capsys.readouterr().err and not ran.exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a film")["input_ids"] == expected
    assert not (tmp_path / "out" / "tokenization_own.py").exists()
    assert "AutoTokenizer.from_pretrained(folder)" in (tmp_path / "out" / "README.md").read_text()


def test_a_class_that_transformers_took_over_needs_no_code(own, ran, tiny_data, tmp_path, capsys):
    """As that of Phi-3; no file of the export names code that is not in it."""
    named = {"AutoConfig": "BertConfig", "AutoModelForSequenceClassification": "BertForSequenceClassification"}
    named = {name: f"configuration_doubled.{ref}" for name, ref in named.items()}
    configure(own, auto_map=named)
    main(["factorize", str(own), str(tmp_path / "out"), "--density", "1.0", "--weighting", "none", *options(tiny_data)])
    assert "(configuration_doubled.py) is not run; transformers has the class BertConfig" in capsys.readouterr().err
    assert "doubled" not in (tmp_path / "out" / "config.json").read_text() and not ran.exists()
