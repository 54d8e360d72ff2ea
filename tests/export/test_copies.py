"""What is copied or uploaded of an export: its own files; a push against a small hub is done, or one line says why."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from tiny import make_net
from transformers import AutoModelForSequenceClassification

from lit_compress.export import copies as pushes
from lit_compress.export.copies import export_files
from lit_compress.utils.errors import UserError

CARD = '---\nlicense: mit\n---\n```python\nfolder = "."  # this folder, or its name on the hub\n```\n'


@pytest.fixture
def folder(tmp_path):
    """An export, as far as a push looks at it."""
    (tmp_path / "out" / "1_Pooling").mkdir(parents=True)
    for name, text in {"README.md": CARD, "model.safetensors": "new", "1_Pooling/config.json": "{}"}.items():
        (tmp_path / "out" / name).write_text(text)
    return tmp_path / "out"


@pytest.fixture
def mine(hub, monkeypatch):
    """The hub, with a token that may write."""
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    return hub


@pytest.mark.parametrize("private", [True, False])
def test_a_folder_is_uploaded_under_the_name_that_the_hub_gives(private, folder, mine):
    assert pushes.push(folder, "small", private) == f"{mine.endpoint}/me/small"
    made = mine.model("me/small")
    assert made.private == private and made.files["1_Pooling/config.json"] == b"{}"
    assert b'folder = "me/small"' in made.files["README.md"] and 'folder = "."' in (folder / "README.md").read_text()


def test_what_the_folder_no_longer_has_goes_in_the_same_commit(folder, mine):
    mine.add("me/small", {"model.onnx": b"old", "model.safetensors": b"old", ".gitattributes": b"x"}, private=True)
    pushes.push(folder, "me/small")
    made = mine.model("me/small")
    names = [".gitattributes", "1_Pooling/config.json", "README.md", "manifest.json", "model.safetensors"]
    assert sorted(made.files) == names and b'"1_Pooling/config.json"' in made.files["manifest.json"]
    assert len(made.commits) == 2 and made.files["model.safetensors"] == b"new" and made.private


def test_a_public_repository_is_not_taken_for_a_private_one(folder, mine):
    mine.add("me/small", {"a": b"1"})
    for push in (lambda: pushes.check_push("small", True), lambda: pushes.push(folder, "me/small", True)):
        with pytest.raises(UserError, match="'me/small' is public, and --private asks for a private one"):
            push()
    assert mine.model("me/small").files == {"a": b"1"}


def test_a_refused_push_leaves_no_repository(folder, mine):
    mine.fault = lambda method, path: 400 if "/commit/" in path else None
    with pytest.raises(UserError, match=r"cannot upload to 'me/small'.*the export is in"):
        pushes.push(folder, "me/small")
    assert not mine.repositories
    mine.add("me/small", {"a": b"1"})
    with pytest.raises(UserError):
        pushes.push(folder, "me/small")
    assert mine.model("me/small").files == {"a": b"1"}  # it was there before


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        (None, "me/small", "there is no token; log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_wrong", "me/small", "the token is invalid or has expired"),
        ("hf_reader", "me/small", "the token of 'me' may only read"),
        ("hf_me", "corp/small", r"your token may not do this \(.*namespace corp"),
    ],
)
def test_the_token_is_looked_at_before_the_work(token, name, words, folder, hub, monkeypatch):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=words) as error:
        pushes.push(folder, name)
    assert not hub.repositories and "\n" not in str(error.value)
    if name.startswith("me/"):
        with pytest.raises(UserError, match=words):
            pushes.check_push(name)


def test_a_card_that_the_hub_refuses_names_the_field(folder, mine):
    mine.refuses_cards = '"license" must be one of [apache-2.0, mit]'
    with pytest.raises(UserError, match=r'cannot upload .*"license" must be one of'):
        pushes.push(folder, "me/small")
    assert not mine.repositories


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_hub_it_is_one_line(offline, folder, mine, monkeypatch):
    if offline:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        mine.close()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set" if offline else r"cannot upload to 'me/small': "):
        pushes.check_push("me/small")


@pytest.mark.parametrize(("name", "near"), [("me/small model", "me/small-model"), ("a/b/c", "b/c"), ("-x", "x")])
def test_a_name_that_cannot_be_is_refused_before_the_work(name, near):
    with pytest.raises(UserError, match=rf"'{name}' is no name of a repository; e.g. {near}$"):
        pushes.check_push(name)


def test_the_command_keeps_the_export(tmp_path, monkeypatch, capsys, mine):
    from mistakes import fails

    from lit_compress.cli import commands
    from lit_compress.cli.words import Line

    out, report = tmp_path / "out", {"compressed": {"density": 0.5}, "export_difference": 0.0}
    done = []

    def made(run, out, *_):
        done.append(out)
        out.mkdir()
        (out / "config.json").write_text("{}")
        return report

    monkeypatch.setattr(commands, "Run", lambda folder: SimpleNamespace(config=lambda **_: {"export": {}}, net=str))
    job = SimpleNamespace(build=lambda: SimpleNamespace(method=None, data=None))
    monkeypatch.setattr(commands, "parse_stored", lambda *_, **__: job)
    monkeypatch.setattr(commands, "export_run", made)
    monkeypatch.setattr(commands, "print_choices", lambda report: None)
    assert "no name of a repository" in fails(capsys, "export", "run", out, "--push_to_hub", "me/ü")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token is invalid" in fails(capsys, "export", "run", out, "--push_to_hub", "me/small") and not done
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    mine.fault = lambda method, path: 503 if "/commit/" in path else None
    line = fails(capsys, "export", "run", out, "--push_to_hub", "me/small")
    assert "push_to_hub: cannot upload to 'me/small': status 503" in line and out.is_dir()
    mine.fault = lambda method, path: None
    commands.export("run", str(tmp_path / "again"), push_to_hub="small", line=Line("export"))
    assert f"pushed: {mine.endpoint}/me/small" in capsys.readouterr().out


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
    with pytest.raises(UserError, match=r"push_to_hub: .* is a link to"):  # before the hub is asked
        pushes.push(files, "me/small")


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
    pushes.copy_export("export", net, tmp_path / "export", tmp_path / "copy")
    config, copy = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "copy"))
    assert config["dtype"] == copy["dtype"] == "float16" and net.config.dtype != "float16"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "copy").dtype is torch.float16
