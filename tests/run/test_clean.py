"""A run keeps what it needs; what it does not need goes, whenever that is asked for and however often."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from mistakes import rewrite

from lit_compress.__main__ import main
from lit_compress.run.finish import share_weights
from lit_compress.run.folder import Run
from lit_compress.utils.errors import UserError


@pytest.fixture
def run(tmp_path):
    """A finished run: its records, and words in place of its models."""
    made = Run(tmp_path / "run")
    made.begin({"model": {"class_path": "SVD", "init_args": {"density": 0.5}}, "export": {}})
    for name in ("dense", "retrain"):
        made.net(name).mkdir(parents=True)
        (made.net(name) / "model.safetensors").write_text(name)
        made.finish({"name": name})
    (made.folder / "export").mkdir()
    (made.folder / "export" / "model.safetensors").write_text("retrain")
    return made


def gone() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def litter(run):
    """Leave all that earlier versions kept and that killed processes leave; return what must go."""
    pid, left = gone(), []
    for stage in run.finished():
        left += [run.stage(stage) / name for name in ("best.ckpt", "last.ckpt", ".last.ckpt.tmp")]
    left += [run.folder / f".stages.json.{pid}.tmp", run.stage("dense") / f".net.{pid}.old" / "model.safetensors"]
    left += [run.folder / f".export.{pid}.tmp" / "model.safetensors"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10)
    return left


def test_what_is_not_needed_goes_and_all_else_stays(run, capsys):
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    left = litter(run)
    main(["clean", str(run.folder)])
    said = capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before
    assert f"{10 * len(left)} bytes are free" in said and said.count("removed ") == len(left)
    main(["clean", str(run.folder)])
    assert capsys.readouterr().out.startswith("0 bytes are free")


def test_what_a_resume_needs_stays(run):
    """The checkpoints of a stage that is not finished, files of a process that runs, a folder without a successor."""
    records = json.loads((run.folder / "stages.json").read_text())
    rewrite(run.folder / "stages.json", json.dumps(records[:1]))
    shutil.rmtree(run.net("retrain"))
    needed = [run.stage("retrain") / name for name in ("best.ckpt", "last.ckpt", ".best.ckpt.tmp")]
    needed += [run.folder / f".export.{os.getpid()}.tmp", run.stage("retrain") / f".net.{gone()}.old"]
    for path in needed:
        path.write_bytes(b"x")
    (run.stage("dense") / "best.ckpt").write_bytes(b"x")
    assert list(run.clean()) == [run.stage("dense") / "best.ckpt"]
    assert all(path.exists() for path in needed)


def test_a_finished_stage_whose_net_is_gone_keeps_its_checkpoint(run):
    (run.stage("retrain") / "best.ckpt").write_bytes(b"x")
    shutil.rmtree(run.net("retrain"))
    assert not run.clean()


def test_killed_half_way_it_goes_on_the_next_time(run, monkeypatch):
    left, removed = litter(run), []
    unlink = type(run.folder).unlink

    def once(path, missing_ok=False):
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(run.folder), "unlink", once)
        run.clean()
    assert 0 < sum(path.exists() for path in left) < len(left)
    run.clean()
    assert not any(path.exists() for path in left)


def test_a_run_has_its_weights_once(run, monkeypatch):
    """The last stage's are the export's; others, and all on a file system without links, stay files of their own."""
    dense, mine = (run.net(name) / "model.safetensors" for name in ("dense", "retrain"))
    theirs = run.folder / "export" / "model.safetensors"

    def refuse(*_):
        raise OSError("no links here")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", refuse)
        share_weights(mine.parent, theirs.parent)
    share_weights(dense.parent, theirs.parent)
    assert not mine.samefile(theirs) and not dense.samefile(theirs)
    share_weights(mine.parent, theirs.parent)
    assert mine.samefile(theirs) and not run.clean()
    theirs.unlink()
    assert mine.read_text() == "retrain"


def test_only_runs_are_cleaned(tmp_path, capsys):
    (tmp_path / "best.ckpt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["clean", str(tmp_path)])
    assert stop.value.code == 2 and "is not a run folder" in capsys.readouterr().err
    assert (tmp_path / "best.ckpt").exists()


def test_links_are_not_followed(run, tmp_path):
    """Not a stage's folder that is a link, not a stage whose name is a path, not a link beside them."""
    other = tmp_path / "other"
    shutil.copytree(run.stage("retrain"), other)
    shutil.rmtree(run.stage("retrain"))
    run.stage("retrain").symlink_to(other)
    (run.folder / "more").symlink_to(other)
    for name in ("best.ckpt", f".net.{gone()}.tmp"):
        (other / name).write_text("mine")
    assert not run.clean()
    records = json.loads((run.folder / "stages.json").read_text())
    rewrite(run.folder / "stages.json", json.dumps([records[0] | {"name": "../other"}]))
    with pytest.raises(UserError, match="holds something else than the records of stages"):
        run.clean()
