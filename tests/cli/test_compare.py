"""The command ``compare``: what it prints, what it refuses, and a comparison that is killed and goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import forks
import pytest
import yaml
from hub import as_a_new_process
from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.cli.recipes import COMPARISONS, resolve_config, shipped
from lit_compress.run.comparison import read_comparison
from lit_compress.utils.errors import UserError

CONFIG = {
    "options": {"data.task": "sst2", "data.batch_size": 8, "trainer.accelerator": "cpu", "trainer.logger": False},
    "teacher": {"model.dense.epochs": 1, "model.dense.learning_rate": 3e-3},
    "budgets": [0.5], "seeds": [1], "learning_rates": [1e-3], "updates": 8, "hold_out": 20,
    "methods": {
        "SVD": {},
        "SecondOrder, no training": {"train": False, "options": {"model.retrain.calibration_examples": 16}},
    },
}  # fmt: skip


@pytest.fixture
def command(tmp_path, tiny_backbone, tiny_data, monkeypatch):
    """A tiny comparison as a command; its runs are forks, whose exports are not opened in yet another process."""
    monkeypatch.setattr("lit_compress.run.workers.start_process", forks.start_process)
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    options = ["--model.backbone", str(tiny_backbone), "--data.path", str(tiny_data)]

    def words(out, *more):
        return ["compare", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / out), *options, *more]

    return words


def test_a_list_has_a_command_per_line_that_fit_takes(command, capsys, monkeypatch):
    main(command("a", "--list", "--seeds", "1", "2"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2 and all(line.startswith("python -m lit_compress fit --model=") for line in lines)
    main(command("a", "--list", "--methods", "SVD"))
    assert capsys.readouterr().out.splitlines()[1].replace("a/", "") == lines[2].replace("a/", "")
    assert "--data.hold_out=20" in lines[2] and "--trainer.limit_train_batches=8" in lines[2]
    two = SimpleNamespace(num_devices=2, num_nodes=1)
    monkeypatch.setattr("lit_compress.run.trainer.bare_trainer", lambda given: two)
    main(command("a", "--list"))  # as on a machine with two GPUs, whose devices are 'auto'
    assert "--trainer.limit_train_batches=4" in capsys.readouterr().out


def test_all_runs_read_the_commit_that_the_first_one_read(command, hub, tiny_backbone, tmp_path, capsys):
    first = hub.add("me/net", tiny_backbone)
    words = [word if word != str(tiny_backbone) else "me/net" for word in command("a", "--list")]
    main(words)
    lines = capsys.readouterr().out.splitlines()
    pinned = {f"--model.backbone=me/net@{first}"}
    assert len(lines) == 3 and all(pinned <= set(line.split()) for line in lines)
    (tmp_path / "a" / "teachers" / "seed=1").mkdir(parents=True)
    record = {"model": {"class_path": "SVD", "init_args": {"backbone": "me/net", "revision": first}}, "export": {}}
    (tmp_path / "a" / "teachers" / "seed=1" / "config.yaml").write_text(yaml.safe_dump(record))
    assert (
        hub.add("me/net", {path.name: path.read_bytes() for path in tiny_backbone.iterdir()} | {"a.json": b""}) != first
    )
    as_a_new_process()
    main(words)
    assert capsys.readouterr().out.splitlines() == lines


def test_options_that_are_fair_are_those_of_all_runs(command, capsys):
    fair = ["trainer.precision=32-true", "trainer.gradient_clip_val=0.5", "trainer.limit_val_batches=2",
            "trainer.accumulate_grad_batches=2", "data.batch_size=4", "data.train_examples=60", "checkpoint_every=7",
            "model.retrain.weight_decay=0.1", "model.distillation.alpha=0.5", "export.dtype=float32"]  # fmt: skip
    main(command("a", "--list", *(f"--{option}" for option in fair)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(f"--{option}" in line.split() for line in lines for option in fair)
    with pytest.raises(SystemExit):
        main(["compare", "--model", "SVD", "--help"])
    said = capsys.readouterr().out
    assert "--data.batch_size" in said and "--model.retrain.weight_decay" in said
    assert not [name for name in ("run_dir", "data.hold_out", "model.density", "retrain.epochs") if f"{name} " in said]


def test_mistakes_are_one_line(command, capsys):
    assert "did you mean 'updates'?" in fails(capsys, *command("a", "--update", "3"))
    assert "index: 9 is not in [0, 2]; nearest valid 2" in fails(capsys, *command("a", "--index", "9"))
    assert "no method 'SDV'" in fails(capsys, *command("a", "--methods", "SDV"))
    assert "nearest: updates 9010" in fails(capsys, *command("a", "--updates", "9001"))
    assert "did you mean 'compare_sst2.yaml'?" in fails(capsys, "compare", "--config", "compare_sst.yaml")
    said = "error: trainer.max_steps: compare does not take it; give updates"
    assert fails(capsys, *command("a", "--trainer.max_steps", "2")) == said
    twice = ["--trainer.callbacks+=DeviceStatsMonitor", "--trainer.callbacks+=RichModelSummary"]
    assert "trainer.callbacks+: it is given twice; give a list" in fails(capsys, *command("a", *twice))
    with pytest.raises(UserError, match=r"unknown key 'claims' in 'c\.yaml'"):
        read_comparison({"methods": {"SVD": None}, "budgets": [0.5], "claims": "claims.yaml"}, "c.yaml")


def test_a_run_that_fails_ends_the_command_with_an_error(command, tmp_path, capsys):
    """The other run is finished, and its results are there."""
    options = {"train": False, "options": {"model.retrain.calibration_examples": 5000}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG | {"methods": CONFIG["methods"] | {"SecondOrder": options}}))
    words = command("a", "--methods", "SecondOrder", "SecondOrder, no training")
    assert fails(capsys, *words) == "error: 1 of 2 runs failed; the same command tries them again"
    cells = json.loads((tmp_path / "a" / "compare.json").read_text())["cells"]
    assert sorted(cell["status"] for cell in cells) == ["done", "failed", "missing"]


def test_the_shipped_comparisons_can_be_read():
    made = {name: read_comparison(resolve_config(name, None, COMPARISONS), name) for name in shipped(COMPARISONS)}
    assert list(made) == [f"compare_{task}.yaml" for task in ("mrpc", "qnli", "sst2", "stsb", "quickstart")]


def test_a_row_of_a_comparison_is_merged_over_the_head(capsys):
    """And says its task, which no other does."""
    row = resolve_config("compare.yaml", "mrpc", COMPARISONS)
    assert row["options"]["data.task"] == "mrpc" and row["hold_out"] == row["updates"] == 400
    assert not capsys.readouterr().err and "tasks" not in row
    assert row["teacher"] == {"model.dense.epochs": 5, "model.dense.learning_rate": 1e-4}  # the head's, the row's
    assert resolve_config("compare.yaml", "cola", COMPARISONS)["options"]["data.task"] == "cola"
    assert "no row for task 'cola'" in capsys.readouterr().err


def result(out):
    """What a comparison found, without what differs from time to time."""
    found = json.loads((out / "compare.json").read_text())
    for cell in found["cells"]:
        report = json.loads((out / cell["run"] / "report.json").read_text())
        cell["metric"], cell["dense"] = report["compressed"]["metric"], report["dense"]["metric"]
        for one in (cell, *cell["tried"]):
            one.pop("seconds")
    return found["cells"]


# over 10 s: two comparisons, one of them killed and continued
def test_a_comparison_that_is_killed_goes_on_to_the_same_results(command, tmp_path, capsys):
    main(command("whole"))
    said = capsys.readouterr().out
    assert "[2/2] secondorder-no-training-density=0.5-seed=1: done" in said
    cells = result(tmp_path / "whole")
    assert [(cell["status"], cell["learning_rate"]) for cell in cells] == [("done", 1e-3), ("done", None)]
    assert cells[0]["tried"][0]["held_out"] is not None
    out = tmp_path / "killed"
    for part in ("teachers", "state"):
        shutil.copytree(tmp_path / "whole" / part, out / part, ignore=shutil.ignore_patterns("*0.5*"))
    if not (pid := os.fork()):
        os.setsid()
        main(command("killed"))
        os._exit(0)
    while not (out / cells[0]["run"] / "retrain").is_dir():  # the first run is being trained
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    stamp = (out / "teachers" / "seed=1" / "report.json").stat().st_mtime_ns
    for index in ("1", "2"):
        assert not (out / "report").is_dir()
        main(command("killed", "--index", index))
    assert result(out) == cells and (out / "report" / "index.html").is_file()
    assert (out / "teachers" / "seed=1" / "report.json").stat().st_mtime_ns == stamp
    teacher, copy = (folder / "dense" / "net" / "model.safetensors" for folder in (
        out / "teachers" / "seed=1", out / cells[0]["run"]))  # fmt: skip
    assert teacher.samefile(copy)
