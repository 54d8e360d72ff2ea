"""What is copied or uploaded of an export: its own files, nothing that a link brings from elsewhere."""

from __future__ import annotations

import json
import os

import pytest

from lit_compress.export.copies import copy_export, export_files, push
from lit_compress.utils.errors import UserError
from lit_compress.utils.manifest import difference

NAMES = {
    "config.json", "structure.json", "report.json", "README.md", "model-00001-of-00002.safetensors", "tokenizer.json",
    "modeling_compressed.py", "1_Pooling/config.json", "2_Dense/model.safetensors", "model.onnx", "decode.onnx",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "export" / name).write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")
    return tmp_path / "export"


def test_known_files_are_copied_and_others_are_named(folder, tmp_path, capsys):
    for name in ("predictions.jsonl", "notes.txt", "setup.py", "2_Dense/notes.txt", ".git/config", "x/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (tmp_path / "copy").mkdir()
    copy_export("export: 'here'", folder, tmp_path / "copy")
    copied = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()}
    assert copied == NAMES | {"manifest.json"} and difference(tmp_path / "copy") is None
    left = "2_Dense/notes.txt, notes.txt, predictions.jsonl, setup.py, x/config.json"
    assert f"note: export: 'here': files that no export has are left out: {left}" in capsys.readouterr().err


def test_code_goes_with_a_model_that_had_code_of_its_own(folder):
    (folder / "modeling_own.py").write_text("own")
    assert "modeling_own.py" not in export_files("x", folder)
    (folder / "config.json").write_text(json.dumps({"dense_auto_map": {"AutoConfig": "configuration_own.Own"}}))
    assert "modeling_own.py" in export_files("x", folder)


@pytest.mark.parametrize(
    ("name", "to"),
    [("notes.txt", "../secret/config.json"), ("generation_config.json", "../secret/config.json"),
     ("3_Dense", "../secret"), ("mine", "../secret"), ("vocab.txt", "../../blobs/secret"), ("vocab.txt", "../x"),
     ("2_Dense/config.json", "../../secret/config.json"), ("4_Dense", "1_Pooling")],
)  # fmt: skip
def test_a_link_out_of_the_folder_is_refused(name, to, folder, tmp_path):
    (folder / name).symlink_to(to)
    with pytest.raises(UserError, match=f"x: '{name}' is a link to '.*remove it"):
        export_files("x", folder)
    with pytest.raises(UserError, match=r"push_to_hub: .* is a link to"):  # before the hub is asked
        push(folder, "me/small")


def test_links_inside_and_those_of_the_hubs_cache_are_files(folder, tmp_path):
    (folder / "vocab.txt").symlink_to("tokenizer.json")
    assert export_files("x", folder).keys() == NAMES | {"vocab.txt"}
    repository = tmp_path / "hub" / "models--me--small"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = folder.rename(repository / "snapshots" / "0f")
    for number, name in enumerate(sorted(NAMES)):
        blob = (snapshot / name).rename(repository / "blobs" / str(number))
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    (tmp_path / "copy").mkdir()
    copy_export("x", snapshot, tmp_path / "copy")
    assert not any(path.is_symlink() for path in (tmp_path / "copy").rglob("*"))
    assert (tmp_path / "copy" / "1_Pooling" / "config.json").read_text() == "{}"
    blobs = (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(blobs)  # leads on
    with pytest.raises(UserError, match="is a link to"):
        export_files("x", snapshot)
