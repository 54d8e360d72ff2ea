"""A GGUF file is a model wherever one is given; what cannot be read of one is a line."""

from __future__ import annotations

import json

import pytest
import torch
from gguf_files import convert
from mistakes import fails
from tiny import make_net, write_texts

from lit_compress.__main__ import main
from lit_compress.models.gguf import as_folder
from lit_compress.utils.errors import UserError

gguf = pytest.importorskip("gguf", reason="reads GGUF files; pip install '.[gguf]'")
pytest.importorskip("accelerate", reason="reads GGUF files; pip install '.[gguf]'")

LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
PIECES = ["<unk>", "<pad>", "<|endoftext|>", "<s>", *LETTERS, "\u0120", "\u0120a", "th", "the", "fi", "fil", "film"]
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip  # blocks of 32 values


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """A Llama with a vocabulary of letters, and the folder it is in."""
    folder = tmp_path_factory.mktemp("net")
    tiny = make_net("llama", "plain_text", **WIDE, vocab_size=len(PIECES), initializer_range=0.2).eval()
    tiny.save_pretrained(folder)
    return tiny, folder


@pytest.fixture(scope="module")
def file(net, tmp_path_factory):
    """The model as a GGUF file of 8-bit values, alone in its folder."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-q8.gguf"
    convert(net[1], path, PIECES, "Q8_0")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


def test_the_folder_has_the_values_of_the_file(net, tmp_path):
    """Of 32 bits: equal. It is read once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(net[1], tmp_path / "tiny.gguf", PIECES)
    folder = as_folder("model", tmp_path / "tiny.gguf")
    read = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(4, 20)[None]
    assert read.dtype == torch.float32
    assert torch.allclose(read(ids).logits, net[0](ids).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).tokenize("the film") == ["the", "\u0120", "film"]
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert as_folder("model", tmp_path) == folder and (folder / "model.safetensors").stat().st_mtime_ns == made


def test_commands_take_it(file, tmp_path, capsys):
    data = ["--data.task", "plain_text", "--data.path", str(write_texts(tmp_path)), "--data.max_length", "16"]
    main(["validate", str(file), *data])
    of_file = capsys.readouterr()
    assert "tiny-q8.gguf' is a GGUF file of type Q8_0; its weights are made float32" in of_file.err
    main(["validate", str(file.parent), *data])
    assert capsys.readouterr().out == of_file.out
    main(["factorize", str(file), str(tmp_path / "out"), *data, "--density", "0.5", "--weighting", "none"])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["config"]["model"]["init_args"]["backbone"] == str(file)


def written(path, arch):
    """Write a GGUF file of an architecture without tensors."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_cannot_be_read_is_one_line(file, tmp_path, capsys):
    whole = file.read_bytes()
    (tmp_path / "text.gguf").write_text("Entry not found")
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "tiny-00001-of-00002.gguf").write_bytes(whole)
    written(tmp_path / "other.gguf", "mamba")
    said = {
        "text.gguf": "cannot read 'text.gguf'",
        "cut.gguf": "cannot read 'cut.gguf'",
        "tiny-00001-of-00002.gguf": "is one of several files; join them with llama-gguf-split --merge",
        "other.gguf": "architecture 'mamba' is not supported",
    }
    for name, words in said.items():
        line = fails(capsys, "validate", tmp_path / name, "--data.task", "plain_text", "--data.path", tmp_path)
        assert words in line and name in line
    with pytest.raises(UserError, match="has 4 GGUF files; give one of them"):
        as_folder("model", tmp_path)


def test_a_missing_package_is_one_line(file, monkeypatch):
    monkeypatch.setattr("lit_compress.models.gguf.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs gguf; in the clone: pip install '\.\[gguf\]'"):
        as_folder("model", file)
