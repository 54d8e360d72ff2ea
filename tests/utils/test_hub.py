"""Names on the hub: what comes, what is asked, what is said when the hub does not give it."""

from __future__ import annotations

import huggingface_hub.constants
import pytest
from hub import as_a_new_process

from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import (
    choose_configuration,
    dataset_snapshot,
    is_name,
    model_snapshot,
    split_name,
    tables_among,
    weights_among,
)

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"one", "README.md": b"# a\n"}
OPTION = "model.backbone"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_what_is_needed_comes(hub):
    modules = {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}
    other = {"pytorch_model.bin": b"x", "tf_model.h5": b"x", "onnx/model.onnx": b"x", "onnx/config.json": b"{}",
             "model.fp16.safetensors": b"x", "consolidated.safetensors": b"x",
             "2_Dense/model.safetensors": b"x"}  # fmt: skip
    modules |= {"code.py": b"x"}  # of an export, which transformers runs
    commit = hub.add("me/net", FILES | modules | other)
    found = model_snapshot(OPTION, "me/net")
    assert (found.name, found.commit, found.pinned) == ("me/net", commit, f"me/net@{commit}")
    assert names(found.folder) == sorted([*FILES, *modules])


def test_all_of_an_export_comes(hub):
    hub.add("me/small", FILES | {"structure.json": b"{}", "model.onnx": b"x", "modeling_compressed.py": b"x"})
    assert {"model.onnx", "modeling_compressed.py"} <= set(names(model_snapshot("load", "me/small").folder))


def test_pickles_come_where_there_are_no_safetensors():
    assert weights_among(["pytorch_model-00001-of-00002.bin", "config.json"]) == ["pytorch_model-00001-of-00002.bin"]
    assert weights_among(["tf_model.h5", "sub/model.safetensors", "adapter_model.safetensors"]) == []


def test_a_name_is_asked_for_once_and_a_commit_never_again(hub):
    first = hub.add("me/net", FILES)
    assert model_snapshot(OPTION, "me/net") is model_snapshot(OPTION, "me/net")
    as_a_new_process()
    hub.requests.clear()
    assert model_snapshot(OPTION, f"me/net@{first}").commit == first and not hub.asked()
    second = hub.add("me/net", FILES | {"config.json": b'{"a": 1}'})
    assert model_snapshot(OPTION, "me/net").commit == second
    assert len([line for line in hub.asked() if "/api/models/" in line and "/tree/" not in line]) == 1
    tag = hub.add("me/net", FILES, revision="v1")
    assert model_snapshot(OPTION, "me/net@v1").commit == tag


def test_offline_takes_the_newest_commit_that_was_seen_of_the_revision(hub, monkeypatch):
    """Not the one that was downloaded last."""
    tables = {"train.csv": b"text,label\na,b\n"}
    old = hub.add("me/rows", tables, kind="datasets")
    new = hub.add("me/rows", tables | {"train.csv": b"text,label\nc,d\n"}, kind="datasets")
    assert dataset_snapshot("data.path", "me/rows").commit == new
    assert dataset_snapshot("data.path", "me/rows", old).commit == old  # is modified last
    as_a_new_process()
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert dataset_snapshot("data.path", "me/rows").commit == new
    assert dataset_snapshot("data.path", "me/rows", old).commit == old
    assert not hub.asked()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the cache does not have all of it"):
        dataset_snapshot("data.path", "me/other")


def test_what_is_half_there_is_asked_for_again(hub):
    hub.add("me/net", FILES)
    hub.fault = lambda method, path: 404 if "model.safetensors" in path else None
    with pytest.raises(UserError):
        model_snapshot(OPTION, "me/net")
    hub.fault = lambda method, path: None
    assert "model.safetensors" in names(model_snapshot(OPTION, "me/net").folder)


@pytest.mark.parametrize("trouble", ["closed", "drop", 503])
def test_the_cache_serves_while_the_hub_does_not(trouble, hub):
    commit = hub.add("me/net", FILES)
    model_snapshot(OPTION, "me/net")
    as_a_new_process()
    if trouble == "closed":
        hub.close()
    else:
        hub.fault = lambda method, path: trouble
    assert model_snapshot(OPTION, "me/net").commit == commit
    expected = r"cannot load the model 'me/other' from the hub: .*; without network give"
    with pytest.raises(UserError, match=expected):
        model_snapshot(OPTION, "me/other")


@pytest.mark.parametrize(
    ("name", "token", "words"),
    [
        ("me/nothing", None, "no folder and no model of this name, or it is private: log in with `hf auth login`"),
        ("me/nothing", "hf_me", "no folder and no model of this name, or your token may not read it"),
        ("me/private", "hf_other", "no folder and no model of this name, or your token may not read it"),
        ("corp/gated", None, "it is gated; ask for access on its page"),
        ("me/net", "hf_wrong", "the token is invalid or has expired"),
        ("me/net@v9", None, "'me/net@v9' from the hub: it has no such revision"),
        ("me/gguf", None, r"has no config.json on the hub \(model.gguf\)"),
        ("me/tf", None, r"has no weights for PyTorch on the hub \(config.json, tf_model.h5\)"),
    ],
)
def test_the_reason_and_what_to_do(name, token, words, hub, monkeypatch):
    hub.add("me/net", FILES)
    hub.add("me/private", FILES, private=True)
    hub.add("corp/gated", FILES, gated=True)
    hub.add("me/gguf", {"model.gguf": b"x", "README.md": b""})
    hub.add("me/tf", {"config.json": b"{}", "tf_model.h5": b"x"})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=words) as error:
        model_snapshot(OPTION, name)
    assert str(error.value).startswith(f"{OPTION}: ") and "without network" not in str(error.value)


def test_what_can_be_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "here").mkdir()
    assert is_name("gpt2") and is_name("me/net") and is_name("me/net@refs/pr/1") and not is_name("me/here")
    assert not any(map(is_name, ("./net", "/net", "~/net", "a/b/c", "a b", "")))


def test_a_script_is_not_run_and_the_line_names_its_tables(hub):
    hub.add("me/script", {"script.py": b"raise SystemExit", "README.md": b"# x"}, kind="datasets")
    made = hub.add("me/script", {"default/train/0000.parquet": b"x"}, kind="datasets", revision="refs/convert/parquet")
    with pytest.raises(UserError, match="the hub may have those of its script: me/script@refs/convert/parquet"):
        dataset_snapshot("data.path", "me/script")
    found = dataset_snapshot("data.path", "me/script@refs/convert/parquet")
    assert found.commit == made and names(found.folder) == ["default/train/0000.parquet"]


def test_tables_of_a_configuration():
    files = ["a/train-00000-of-00001.parquet", "b/train.csv", "README.md", "dataset_infos.json", "script.py"]
    assert tables_among(files, {"a": ["a/train-*"], "b": ["b/*"]}, "b") == ["b/train.csv"]
    assert tables_among(files, {"only": ["a/*.parquet"]}, "only") == ["a/train-00000-of-00001.parquet"]
    assert tables_among(files, {}, "a") == files[:1] and tables_among(files, {}, None) == files[:2]


def test_a_revision_is_given_once():
    assert split_name("model.backbone", "me/net@v1", "v1") == ("me/net", "v1") == split_name("", "me/net", "v1")
    with pytest.raises(UserError, match=r"^model\.backbone: 'me/net@v1' names a revision, and 'v2' is given as well"):
        split_name("model.backbone", "me/net@v1", "v2")


def test_a_configuration_that_is_not_there_is_never_replaced_by_another():
    for known in (["default", "extra"], ["default"], ["extra"]):
        with pytest.raises(UserError, match="none is called 'extras'; choose one"):
            choose_configuration("data.path: 'me/rows'", known, "extras")
    assert choose_configuration("", ["extra"], None, "sst2") == "extra"
    assert choose_configuration("", ["sst2", "default"], None, "sst2") == "sst2"
    assert choose_configuration("", ["extra", "default"], None, "sst2") == "default"
