"""A folder is what was written, or one line says what differs."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from lit_compress.utils import manifest
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import check_manifest, difference, write_manifest, write_record

FILES = {"model.safetensors": bytes(range(256)) * 8, "structure.json": b"{}", "1_Pooling/config.json": b"[]"}


@pytest.fixture
def folder(tmp_path):
    for name, content in {**FILES, "README.md": b"# a card"}.items():
        (tmp_path / "net" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "net" / name).write_bytes(content)
    write_manifest(tmp_path / "net")
    return tmp_path / "net"


def test_it_lists_every_file_but_itself_and_the_card(folder):
    listed = json.loads((folder / "manifest.json").read_text())
    assert listed == {
        "files": {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in FILES.items()}
    }
    (folder / "README.md").write_text("# my words")
    (folder / "bench.json").write_text("later")
    (folder / "model.safetensors").touch()
    check_manifest("here", folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone"])
def test_no_change_of_a_bit_and_no_cut_is_silent(name, damage, folder):
    path = folder / name
    good = path.read_bytes()
    path.write_bytes({"bit": bytes([good[0] ^ 1]) + good[1:], "cut": good[:-1]}.get(damage, b""))
    if damage == "gone":
        path.unlink()
    with pytest.raises(UserError, match=f"^here: '{name}' (is missing|has )") as error:
        check_manifest("here", folder)
    assert "\n" not in str(error.value)


def test_sizes_come_first_and_the_line_names_both(folder, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"short")
    monkeypatch.setattr(manifest, "file_hash", None)  # not called
    assert difference(folder) == "'model.safetensors' has 5 bytes, not 2,048"
    with pytest.raises(UserError, match=r"here: 'model.safetensors' .* delete manifest.json if you changed"):
        check_manifest("here", folder)
    (folder / "manifest.json").unlink()
    check_manifest("here", folder)


def test_a_large_file_is_read_once(folder, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"x" * 2**20)
    write_manifest(folder)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert difference(folder, "model.safetensors") is None
    (folder / "model.safetensors").write_bytes(b"y" * 2**20)
    os.utime(folder / "model.safetensors", (1e9, 1e9))
    assert difference(folder) == "'model.safetensors' has another SHA-256"


@pytest.mark.parametrize(
    "content",
    ['{"version": 3}', "[]", '{"files": ["a"]}', '{"files": {"a": "0f"}}', '{"files": {"../a": {}}}', "[" * 10**5],
)
def test_a_manifest_of_another_program_is_left_alone(content, folder):
    (folder / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"its manifest.json is broken"):
        check_manifest("here", folder)
    (folder / "structure.json").unlink()
    check_manifest("here", folder)


def test_a_record_is_valid_whenever_its_writer_is_killed(tmp_path, monkeypatch):
    """Before the first version, between the manifest and the file, and afterwards."""
    path = tmp_path / "stages.json"
    for version in ("[1]", "[1, 2]", "[3, 4]"):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write_text", lambda *_: None)  # killed
            write_record(path, "[9]")
        assert not path.is_file() or difference(tmp_path, path.name) is None
        write_record(path, version)
        assert path.read_text() == version and difference(tmp_path) is None
        write_record(tmp_path / "data.json", version)
        assert difference(tmp_path) is None
    path.write_text("[3, 5]")
    assert difference(tmp_path, "stages.json") == "'stages.json' has another SHA-256"
    assert difference(tmp_path, "data.json") is None
    write_record(path, "[7]")  # what was damaged is no valid version
    path.write_text("[3, 5]")
    assert difference(tmp_path, "stages.json")
