"""The model card is one the hub reads, names the model and not a folder here, and its code runs as it stands."""

from __future__ import annotations

import ast
import json
import re
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import jinja2
import pytest
import yaml
from huggingface_hub import ModelCard

from lit_compress.__main__ import main
from lit_compress.export.card import LEAST, card, license_of, model_name
from lit_compress.tasks import KINDS
from lit_compress.tasks.records import get_task


@pytest.fixture(scope="module")
def run(short_run, tmp_path_factory):
    """A finished SVD run of a backbone with a card of its own."""
    place = tmp_path_factory.mktemp("card")
    folder = place / "run"
    main(["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder)])
    return folder


def blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.S)


@pytest.mark.slow
def test_the_hub_reads_what_was_measured(run):
    text, report = (run / "export" / "README.md").read_text(), json.loads((run / "report.json").read_text())
    data = ModelCard(text).data
    (result,) = data.eval_results
    name = data.base_model
    assert name.startswith("backbone") and data.license == "unknown" and data.datasets == ["nyu-mll/glue"]
    assert result.metric_type == "accuracy" and result.metric_value == pytest.approx(report["compressed"]["metric"])
    assert result.metric_args == {"n": 40} and (result.dataset_config, result.dataset_split) == ("sst2", "validation")
    assert data.pipeline_tag == result.task_type == "text-classification" and data.library_name == "transformers"
    head = yaml.safe_load(text.split("---")[1])
    assert head["model-index"][0]["name"] == f"{name}-sst2-svd"
    assert f"\n# {name} on sst2, compressed by SVD to " in text and str(run.parent.parent) not in text
    assert "of 40 rows" in text and f"torch and transformers {LEAST} or later are enough" in text
    assert f'"transformers>={LEAST}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.slow
def test_its_code_runs_as_it_stands(run, tmp_path, monkeypatch, capsys):
    main(["export", str(run), str(tmp_path / "small"), "--format", "onnx"])
    monkeypatch.chdir(tmp_path / "small")
    code = blocks(Path("README.md").read_text())
    assert len(code) == 2
    names = {}
    capsys.readouterr()
    for block in code:
        exec(block, names)
    said = capsys.readouterr()
    assert said.out.strip() in get_task("sst2").labels
    assert said.err.count("\n") < 2 and "not supported" not in said.err
    assert names["output"].logits.shape == (1, 2) and names["outputs"]["logits"].shape == (1, 2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_code_on_the_output_has_the_names_of_the_code_above_it(kind):
    for code in re.findall("`(.*?[(].*?)`", kind.means):
        names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        assert names <= {"model", "tokenizer", "inputs", "folder", "texts", "documents", "query",
                         "SentenceTransformer", "CrossEncoder"}  # fmt: skip
        assert "folder" not in names or "trust_remote_code=True" in code


@pytest.mark.parametrize(
    ("stored", "words"), [(1.0, "as large as the dense"), (0.4, "40.0% of the blocks' weights are")]
)
def test_zeros_take_what_they_take(stored, words, run):
    report = json.loads((run / "report.json").read_text())
    report["compressed"] |= {"density": 0.25, "stored": stored}
    text = card(report, get_task("sst2"), factors=False)
    assert "stored as zeros" in text and words in text


@pytest.mark.parametrize(
    ("kept", "step", "learned"), [({"kept": True}, 9, True), ({"kept": False}, 0, False), ({}, 0, True)]
)
def test_what_was_learned_is_that_of_the_model_in_the_folder(kept, step, learned, run):
    """By block the refined model is always kept."""
    report = json.loads((run / "report.json").read_text())
    report["refined"] = {"steps": 3, "texts": 60, **kept}
    report["distilled"] = {"steps": 9, "best_step": step, "batch": 4}
    assert ("After the compression the model learned" in card(report, get_task("sst2"), factors=False)) == learned


PROGRAM = {"format": "onnx", "file": "model.onnx", "inputs": ["input_ids"], "outputs": ["logits"], "difference": 1e-6}
FULL = {
    "license": "mit", "dtype": "float16", "by_block": {},
    "vocabulary": {"rows": 1234, "of": 30522, "inputs": 3, "changed": 0, "dev_inputs": 2, "dev_changed": 1},
    "embeddings": {"form": "int8", "bytes": 12345, "of": 99999, "error": 0.0123},
    "program": PROGRAM | {"dtype": "int8", "bytes": 4321, "examples": 64, "metric": 0.8125, "interval": [0.7, 0.9]},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, FULL, {"program": PROGRAM}, {"by_block": {}, "export_difference": None}])
def test_the_template_names_only_what_a_report_has(changes, run, monkeypatch):
    """The library renders what is missing as an empty text; here it is an error."""
    monkeypatch.setattr("jinja2.Template", partial(jinja2.Template, undefined=jinja2.StrictUndefined))
    report = json.loads((run / "report.json").read_text()) | changes
    text = card(report, get_task("sst2"), factors=True)
    (name,) = re.findall(r"\n# (backbone\d+) on sst2, compressed by SVD to ", text)
    assert ModelCard(text).data.base_model == name
    assert text.endswith("except this card.\n") and not re.search(r"[{}]{2}|{%|%}|\n\n\n", text)
    if changes is FULL:
        said = ("1,234 of 30,522", "embeddings: int8, 12,345", "off by 1.2%", "as float16", "4,321 bytes, dev accuracy",
                "index.json` hold their")  # fmt: skip
        assert all(words in text for words in said) and ModelCard(text).data.license == "mit"
        (result,) = ModelCard(text).data.eval_results  # the program's numbers, as in the table
        assert result.metric_value == 0.8125 and "between 0.7000 and 0.9000" in text and "speed-up" not in text


def test_no_name_is_more_than_text(run):
    """Of a label, a column, a method, a metric or a file."""
    hostile = "</code><img src=x>`[a](http://b)\n```\n# c\x1b[31m\u202e"
    task = replace(
        get_task("sst2"), text=(f'a" + open("/tmp/ran").read() + "{hostile}',), labels=(hostile, "b"), name=hostile
    )
    report = json.loads((run / "report.json").read_text()) | {"method": hostile}
    report["metric"]["name"] = hostile
    report["hardware"]["cpu"] = hostile
    text = card(report, task, factors=True)
    body = text.split("\n---\n", 1)[1]
    bare = re.sub(r"```python\n.*?\n```|`[^`\n]*`", "", body, flags=re.S)
    assert "\n# c" not in body and not re.search(r"(?<!\\)[<`]|(?<!\\)\]\(", bare)
    assert all(sign.isprintable() or sign == "\n" for sign in body)
    code = re.search(r"```python\n(.*?)\n```\n", body, re.S)[1]  # which three signs in a line do not end
    named = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = [node for node in named if ast.unparse(node.func) == "tokenizer"]
    assert [argument.value for argument in call.args] == [f"a {task.text[0]}"]


def test_everybody_may_read_what_the_umask_allows(run):
    for path in (run / "export" / "model.safetensors", run / "dense" / "net" / "model.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((path.parent / "config.json").stat().st_mode)


def test_names_and_licences_of_backbones(tmp_path):
    folder = tmp_path / "home" / "My-BERT"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert model_name(str(folder)) == "My-BERT" and license_of(str(folder)) == "unknown"
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# x\n")
    assert license_of(str(folder)) == "apache-2.0"
    (folder / "config.json").write_text('{"_name_or_path": "google/bert"}')
    assert model_name(str(folder)) == "google/bert"
    (folder / "config.json").write_text('{"_name_or_path": "/home/me/secret"}')
    assert model_name(str(folder)) == "My-BERT"
    assert model_name("google/bert") == "google/bert" and license_of("google/bert") == "unknown"
    net = tmp_path / "home" / "first" / "dense" / "net"
    net.mkdir(parents=True)
    assert model_name(str(net)) == "first"
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    assert license_of(str(folder)) == "unknown"
