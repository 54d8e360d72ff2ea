"""What is copied of an export: its own files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from tiny import make_net
from transformers import AutoModelForSequenceClassification

from lit_compress.export.copies import copy_export, export_files, export_folder
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import write_manifest

NAMES = {
    "config.json", "structure.json", "report.json", "README.md", "model-00001-of-00002.safetensors", "tokenizer.json",
    "modeling_compressed.py", "1_Pooling/config.json", "2_Module/model.safetensors", "model.onnx",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    for name in NAMES:
        (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "export" / name).write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")
    return tmp_path / "export"


def test_the_manifest_names_what_is_copied(files, tmp_path):
    """And without one, as in version 0.2, all but hidden files are."""
    write_manifest(files)
    mine = {"predictions.jsonl", "notes.txt", "x/config.json"}
    for name in (*mine, ".git/config", ".env"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("mine")
    (files / "link.txt").symlink_to("../secret/config.json")
    (files / "LICENSE").write_text("mine")
    assert export_files("export: 'here'", files).keys() == NAMES | {"LICENSE"}
    (files / "link.txt").unlink()
    (files / "manifest.json").unlink()
    assert export_files("export: 'here'", files).keys() == NAMES | mine | {"LICENSE"}


def test_files_of_others_stay(files):
    """Next to a new export: all that the earlier one's manifest does not list; what it lists goes."""
    write_manifest(files)
    for name in ("notes.txt", ".git/config", "sub/mine.csv", "__pycache__/x.pyc"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("mine")
    with export_folder(files) as new:
        (new / "config.json").write_text("new")
        (new / "report.json").write_text("new")
        write_manifest(new)
    there = {path.relative_to(files).as_posix(): path.read_text() for path in files.rglob("*") if path.is_file()}
    assert there.pop("manifest.json")
    assert there == {
        "config.json": "new", "report.json": "new", "notes.txt": "mine", ".git/config": "mine", "sub/mine.csv": "mine",
    }  # fmt: skip
    (files / "manifest.json").write_text("broken")
    with export_folder(files) as new:
        (new / "config.json").write_text("newer")
    assert [path.name for path in files.iterdir()] == ["config.json"]


@pytest.mark.parametrize("here", [False, True])
def test_files_of_others_stay_as_they_are(here, files, tmp_path, monkeypatch):
    """Their modes, links and empty folders, e.g. of a repository; also if the working folder gets the new export."""
    write_manifest(files)
    for name, mode in (("secret.env", 0o600), ("run.sh", 0o755)):
        (files / name).write_text("mine")
        (files / name).chmod(mode)
    (files / ".git" / "refs").mkdir(parents=True)
    for name, to in (("data", tmp_path), ("gone", "nowhere"), ("1_Pooling/run", "../run.sh")):
        (files / name).symlink_to(to)
    if here:
        monkeypatch.chdir(files)
    with export_folder(Path() if here else files) as new:
        (new / "1_Pooling").write_text("new")
        write_manifest(new)
    assert {path.name for path in files.iterdir()} == {
        "manifest.json", "1_Pooling", "secret.env", "run.sh", ".git", "data", "gone"
    }  # fmt: skip
    assert [stat.S_IMODE((files / name).stat().st_mode) for name in ("secret.env", "run.sh")] == [0o600, 0o755]
    assert (files / ".git" / "refs").is_dir() and (files / "1_Pooling").read_text() == "new"
    assert [str((files / name).readlink()) for name in ("data", "gone")] == [str(tmp_path), "nowhere"]


def test_a_kill_in_the_working_folder_loses_no_file_of_others(files, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    write_manifest(files)
    (files / "notes.txt").write_text("mine")
    monkeypatch.chdir(files)
    monkeypatch.setattr(Path, "rename", kill)
    monkeypatch.setattr("lit_compress.utils.files._exchange", kill)
    with pytest.raises(KeyboardInterrupt), export_folder(Path()) as new:
        (new / "config.json").write_text("new")
    assert (files / "notes.txt").read_text() == "mine" and (files / "report.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["../secret/config.json", "/etc/passwd", "1_Pooling/../../secret/config.json"])
def test_a_manifest_names_nothing_outside(name, files):
    entry = {"bytes": 6, "sha256": "0"}
    (files / "manifest.json").write_text(json.dumps({"files": {"config.json": entry, name: entry}}))
    with pytest.raises(UserError, match=r"x: its manifest.json is broken"):
        export_files("x", files)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("name", "to"),
    [("notes.txt", "../secret/config.json"), ("README.md", "../secret/config.json"), ("3_Module", "../secret"),
     ("vocab.txt", "../../blobs/secret"), ("vocab.txt", "../x"), ("2_Module/config.json", "../../secret/config.json"),
     ("4_Module", "1_Pooling")],
)  # fmt: skip
def test_a_link_out_of_the_folder_is_refused(name, to, listed, files):
    (files / name).unlink(missing_ok=True)
    (files / name).symlink_to(to)
    if listed:
        entry = {"bytes": 6, "sha256": "0"}
        (files / "manifest.json").write_text(json.dumps({"files": {name: entry}}))
    with pytest.raises(UserError, match=f"x: '{name}' is a link to '.*remove it"):
        export_files("x", files)


def test_a_file_of_a_linked_folder_is_refused(files):
    (files / "3_Module").symlink_to("../secret")
    (files / "manifest.json").write_text(json.dumps({"files": {"3_Module/config.json": {"bytes": 6, "sha256": "0"}}}))
    with pytest.raises(UserError, match=r"x: '3_Module/config.json' is a link to '.*remove it"):
        export_files("x", files)


def test_code_is_not_copied(files, tmp_path):
    """Also if the manifest names it: the copy gets this version's code alone."""
    make_net().save_pretrained(files)
    (files / "setup.py").write_text("mine")
    (files / "modules.json").write_text("[]")
    write_manifest(files)
    (tmp_path / "copy").mkdir()
    copy_export("export", make_net(), files, tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob("*.py")) and (tmp_path / "copy" / "1_Pooling" / "config.json").is_file()


def test_links_inside_and_those_of_the_hubs_cache_are_files(files, tmp_path):
    (files / "vocab.txt").symlink_to("tokenizer.json")
    assert export_files("x", files).keys() == NAMES | {"vocab.txt"}
    repository = tmp_path / "hub" / "models--me--small"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = files.rename(repository / "snapshots" / "0f")
    for number, name in enumerate(sorted(NAMES)):
        blob = (snapshot / name).rename(repository / "blobs" / str(number))
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    assert export_files("x", snapshot).keys() == NAMES | {"vocab.txt"}
    blobs = (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(blobs)  # leads on
    with pytest.raises(UserError, match="is a link to"):
        export_files("x", snapshot)


def test_a_copy_of_an_export_of_16_bits_loads_in_16_bits(tmp_path):
    (tmp_path / "copy").mkdir()
    make_net().half().save_pretrained(tmp_path / "export")
    net = make_net()
    copy_export("export", net, tmp_path / "export", tmp_path / "copy")
    config, copy = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "copy"))
    assert config["dtype"] == copy["dtype"] == "float16" and net.config.dtype != "float16"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "copy").dtype is torch.float16
