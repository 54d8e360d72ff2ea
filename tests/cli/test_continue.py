"""Runs that are there already: not overwritten, continued only with what they were begun with, never half exported."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from mistakes import fails, fit, rewrite

from lit_compress.__main__ import main
from lit_compress.methods import SVD
from lit_compress.run import runner
from lit_compress.run.callbacks import Checkpoints


def test_an_existing_run_is_not_overwritten(run, capsys, short_run):
    assert "exists already; continue it with --ckpt_path last" in fails(capsys, *fit(short_run, run))


def test_a_finished_run_shows_its_table_again(run, tmp_path, capsys, short_run):
    folder = shutil.copytree(run, tmp_path / "run")
    before = (folder / "export" / "model.safetensors").stat().st_mtime_ns
    main(fit(short_run, folder, "--ckpt_path", "last"))
    assert "MB on disk" in capsys.readouterr().out
    assert (folder / "export" / "model.safetensors").stat().st_mtime_ns == before


def test_a_finished_run_is_of_its_rows(run, tmp_path, capsys, short_run, tiny_data):
    """Its table is no answer for others."""
    data = shutil.copytree(tiny_data, tmp_path / "data")
    rows = (data / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("\n".join(rows[1:]) + "\n")
    folder = shutil.copytree(run, tmp_path / "run")
    args = fit(short_run, folder, "--ckpt_path", "last", "--data.batch_size", "5")
    assert OTHER in fails(capsys, *args, "--data.path", str(data))
    main(args)  # another number of devices, and so of rows in a step, is no matter


def test_a_teacher_that_knows_nothing_is_named_under_the_table(run, tmp_path, capsys, short_run):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    report = json.loads((folder / "report.json").read_text())
    assert 0.5 <= report["constant"] < report["dense"]["metric"]
    report["constant"] = 1.0
    rewrite(folder / "report.json", json.dumps(report))
    with pytest.warns(
        match=r"^the dense model has hardly learned anything: dev accuracy 0.\d+, the best constant answer has 1.0000$"
    ):
        main(fit(short_run, folder, "--ckpt_path", "last"))


@pytest.fixture
def stopped(run, tmp_path):
    """The run as it stood in the middle of its last stage."""
    folder = tmp_path / "stopped"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("export", "report.json", "net"))
    shutil.copytree(run / "dense" / "net", folder / "dense" / "net")
    records = json.loads((folder / "stages.json").read_text())[:1]
    rewrite(folder / "stages.json", json.dumps(records))
    return folder


def stop_at_a_checkpoint(args: list[str]) -> None:
    """Continue a run up to its first checkpoint."""
    save = Checkpoints._save

    def once(self, trainer, name, weights_only=False):
        save(self, trainer, name, weights_only)
        if name == "last.ckpt":
            raise RuntimeError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_save", once)
        with pytest.raises(RuntimeError, match="stopped"):
            main([*args, "--ckpt_path", "last"])


def test_a_stage_goes_on_with_another_split_of_its_steps(stopped, short_run, capsys, tmp_path, monkeypatch):
    """The rest of its rows, each once, in as many steps; another number of rows per step is another run."""
    whole, rows = tmp_path / "whole", []
    shutil.copytree(stopped, whole)
    step = SVD.training_step

    def note(self, batch, batch_idx):
        rows.append((self.trainer.global_step, sorted(batch["index"].tolist())))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(SVD, "training_step", note)
    main(fit(short_run, whole, "--ckpt_path", "last"))
    expected, rows[:] = list(rows), []
    args = fit(short_run, stopped, "--checkpoint_every", "5", "--ckpt_path", "last")
    stop_at_a_checkpoint(args[:-2])
    larger = fails(capsys, *args, "--data.batch_size", "8", "--trainer.accumulate_grad_batches", "2")
    assert "data.batch_size: the global batch of " in larger and " was 8, now 16 (" in larger
    main([*args, "--data.batch_size", "4", "--trainer.accumulate_grad_batches", "2"])
    assert rows == expected and len(rows) == 26
    ends = [json.loads((folder / "stages.json").read_text())[-1] for folder in (whole, stopped)]
    assert ends[0]["steps"] == ends[1]["steps"] == 26 and ends[1]["split"] == [4, 2, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\x01broken", "is not a readable checkpoint"),
        (b"", "is not a readable checkpoint"),
        ({"state_dict": {}}, "was not written by SVD, stage retrain; remove it"),
        ({"lit_compress": {"method": "LPAF", "stage": "retrain"}}, "was not written by SVD, stage retrain; remove it"),
    ],
)
def test_corrupt_or_foreign_checkpoint_is_one_line(stopped, content, words, capsys, short_run):
    path = stopped / "retrain" / "last.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    kept = path.read_bytes()
    assert words in fails(capsys, *fit(short_run, stopped, "--ckpt_path", "last"))
    assert path.read_bytes() == kept


OTHER = "had other data; give the same"


def test_other_data_is_refused(run, stopped, capsys, short_run, tmp_path, tiny_data):
    """The schedules would move."""
    checkpoint = torch.load(run / "retrain" / "best.ckpt", weights_only=True)
    assert checkpoint["lit_compress"]["total_steps"] == 26
    data = tmp_path / "less"
    shutil.copytree(tiny_data, data)
    lines = (data / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("\n".join(lines[:50]) + "\n")
    records = json.loads((stopped / "stages.json").read_text())
    for record in records:  # of an earlier version: they do not say with which data, the checkpoint does
        del record["data"]
    rewrite(stopped / "stages.json", json.dumps(records))
    args = fit(short_run, stopped, "--checkpoint_every", "2")
    stop_at_a_checkpoint(args)
    assert OTHER in fails(capsys, *args, "--ckpt_path", "last", "--data.path", str(data))
    lines = (tiny_data / "train.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace("a film", "dull film").replace('"sentence": "', '"sentence": "very ')
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")  # as many rows, another text
    assert OTHER in fails(capsys, *args, "--ckpt_path", "last", "--data.path", str(data))


def test_unfinished_run_is_not_exported(stopped, tmp_path, capsys):
    line = fails(capsys, "export", stopped, tmp_path / "out")
    assert line.endswith("is not finished; repeat its command, fit with --ckpt_path last")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_read_once(run, stopped, short_run, monkeypatch):
    read, found = runner.read_checkpoint, []
    args = [*fit(short_run, stopped), "--checkpoint_every", "2"]
    stop_at_a_checkpoint(args)
    monkeypatch.setattr(runner, "read_checkpoint", lambda path: found.append(path.name) or read(path))
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    main([*args, "--ckpt_path", "last"])
    assert found == ["last.ckpt", "best.ckpt"]


def test_a_stage_that_a_callback_stops_is_said(short_run, tmp_path, capsys):
    stops = "callbacks+=EarlyStopping callbacks.monitor=val/accuracy callbacks.mode=max callbacks.stopping_threshold=0"
    main(fit(short_run, tmp_path / "run", *(f"--trainer.{word}" for word in stops.split())))
    assert "retrain: stopped after step 13 of 26" in capsys.readouterr().err
