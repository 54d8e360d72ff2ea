"""Run folders and exports that an earlier version wrote still load, validate, predict, export and go on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from mistakes import fails, predicted
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import lit_compress as lc
from lit_compress.__main__ import main

FOLDER = Path(__file__).resolve().parent / "old_runs"
FINISHED = ("lpaf", "cofi", "sp3")


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy of the old runs, as working folder: their configs name backbone and data relative to it."""
    shutil.copytree(FOLDER, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_validates_predicts_exports_and_loads_by_its_own_code(name, old, capsys, monkeypatch):
    report = json.loads((old / name / "report.json").read_text())
    for target in (name, f"{name}/export"):
        capsys.readouterr()
        main(["validate", target, "--data.path", "data"])
        said = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
        assert float(said["val/accuracy"]) == pytest.approx(report["compressed"]["metric"], abs=1e-6)
    assert len(predicted(name, old / "predictions.jsonl", "--data.path", "data")) == 40
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    main(["export", name, "again"])
    first, second = (load_file(folder / "model.safetensors") for folder in (old / name / "export", old / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert (old / "again" / "structure.json").read_text() == (old / name / "export" / "structure.json").read_text()
    net = AutoModelForSequenceClassification.from_pretrained(old / name / "export", trust_remote_code=True)
    assert sum(p.numel() for p in net.parameters()) == sum(v.numel() for v in first.values() if v.is_floating_point())


def test_a_stopped_run_goes_on(old, monkeypatch):
    """Gates, multipliers and the map of hidden states are in its checkpoint, under the names they had."""
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    main([
        "fit", "--model", "SP3", "--model.backbone", "backbone", "--data.task", "sst2", "--data.path", "data",
        "--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
        "--model.dense.epochs", "1", "--model.dense.learning_rate", "3e-3", "--model.density", "0.5",
        "--trainer.logger", "false", "--model.prune.epochs", "2", "--model.prune.learning_rate", "1e-3",
        "--model.prune.tokens", "200", "--run_dir", "sp3_stopped", "--checkpoint_every", "16", "--ckpt_path", "last",
    ])  # fmt: skip
    reports = [json.loads((old / name / "report.json").read_text()) for name in ("sp3_stopped", "sp3")]
    records = [json.loads((old / name / "stages.json").read_text()) for name in ("sp3_stopped", "sp3")]
    assert [record["steps"] for record in records[0]] == [record["steps"] for record in records[1]]
    assert reports[0]["compressed"]["density"] == pytest.approx(reports[1]["compressed"]["density"], abs=0.005)


def test_a_run_on_data_that_the_package_made_is_read_with_other_data(old, capsys):
    """The quickstart of 0.2: nobody can read its rows again, and its model is whole."""
    for name in ("config.yaml", "report.json", "export/report.json"):
        text = (old / "lpaf" / name).read_text().replace("backbone: backbone", "backbone: embedded")
        (old / "lpaf" / name).write_text(
            text.replace("task: sst2", "task: docstrings").replace(': "sst2"', ': "docstrings"')
        )
    assert "unknown task 'docstrings'" in fails(capsys, "evaluate", "lpaf")
    main(["evaluate", "lpaf", "--data.task", "sst2", "--data.path", "data"])
    lc.load(old / "lpaf" / "export")
    again = "fit", "--run_dir", "lpaf", "--ckpt_path", "last", "--model.backbone", "backbone", "--data.task", "sst2"
    assert "data.backbone was embedded, now backbone" in fails(capsys, *again, "--data.path", "data")
