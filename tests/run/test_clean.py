"""A run keeps the files that it needs; others go when a process begins to work on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from mistakes import rewrite

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


def claim(run):
    with run.claim():
        (run.folder / ".lock").unlink()


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


def test_what_is_not_needed_goes_and_all_else_stays(run):
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    litter(run)
    for _ in range(2):
        claim(run)
        assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


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
    claim(run)
    assert all(path.exists() for path in needed) and not (run.stage("dense") / "best.ckpt").exists()


def test_a_finished_stage_whose_net_is_gone_keeps_its_checkpoint(run):
    (run.stage("retrain") / "best.ckpt").write_bytes(b"x")
    shutil.rmtree(run.net("retrain"))
    claim(run)
    assert (run.stage("retrain") / "best.ckpt").exists()


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
    assert mine.samefile(theirs)
    theirs.unlink()
    assert mine.read_text() == "retrain"


def test_links_are_not_followed(run, tmp_path):
    """Not a stage's folder that is a link, not a stage whose name is a path, not a link beside them."""
    other = tmp_path / "other"
    shutil.copytree(run.stage("retrain"), other)
    shutil.rmtree(run.stage("retrain"))
    run.stage("retrain").symlink_to(other)
    (run.folder / "more").symlink_to(other)
    for name in ("best.ckpt", f".net.{gone()}.tmp"):
        (other / name).write_text("mine")
    claim(run)
    assert sum(path.is_file() and path.read_text() == "mine" for path in other.iterdir()) == 2
    records = json.loads((run.folder / "stages.json").read_text())
    rewrite(run.folder / "stages.json", json.dumps([records[0] | {"name": "../other"}]))
    with pytest.raises(UserError, match="holds something else than the records of stages"):
        claim(run)
