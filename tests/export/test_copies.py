"""What is copied of an export: its own files."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tiny import make_net
from transformers import AutoModelForSequenceClassification

from lit_compress.export.copies import copy_export, export_files
from lit_compress.utils.errors import UserError

NAMES = {
    "config.json", "structure.json", "report.json", "README.md", "model-00001-of-00002.safetensors", "tokenizer.json",
    "modeling_compressed.py", "1_Pooling/config.json", "2_Dense/model.safetensors", "model.onnx", "decode.onnx",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    for name in NAMES:
        (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "export" / name).write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("secret")
    return tmp_path / "export"


def test_known_files_are_copied_and_others_are_named(files, capsys):
    for name in ("predictions.jsonl", "notes.txt", "setup.py", "2_Dense/notes.txt", ".git/config", "x/config.json"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_text("mine")
    assert export_files("export: 'here'", files).keys() == NAMES
    left = "2_Dense/notes.txt, notes.txt, predictions.jsonl, setup.py, x/config.json"
    assert f"note: export: 'here': files that no export has are left out: {left}" in capsys.readouterr().err


def test_a_folder_called_like_a_program_is_left_out(files):
    (files / "decode.parts").mkdir()
    assert "decode.parts" not in export_files("here", files)


def test_code_goes_with_a_model_that_had_code_of_its_own(files):
    (files / "modeling_own.py").write_text("own")
    assert "modeling_own.py" not in export_files("x", files)
    (files / "config.json").write_text(json.dumps({"dense_auto_map": {"AutoConfig": "configuration_own.Own"}}))
    assert "modeling_own.py" in export_files("x", files)


@pytest.mark.parametrize(
    ("name", "to"),
    [("notes.txt", "../secret/config.json"), ("generation_config.json", "../secret/config.json"),
     ("3_Dense", "../secret"), ("mine", "../secret"), ("vocab.txt", "../../blobs/secret"), ("vocab.txt", "../x"),
     ("2_Dense/config.json", "../../secret/config.json"), ("4_Dense", "1_Pooling")],
)  # fmt: skip
def test_a_link_out_of_the_folder_is_refused(name, to, files):
    (files / name).symlink_to(to)
    with pytest.raises(UserError, match=f"x: '{name}' is a link to '.*remove it"):
        export_files("x", files)


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
