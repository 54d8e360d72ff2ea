"""Loading of backbones: tokenizers and nets of decoders, most of which have no padding token."""

import json

import pytest
import torch
from tiny import WORDS, make_net, write_backbone

from lit_compress.models.backbones import load_config, load_net, load_tokenizer
from lit_compress.models.files import net_bytes, stored_dtype
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral")


def without(folder, *tokens):
    """Take special tokens off the tokenizer in ``folder``."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in settings.items() if key not in tokens}))
    return str(folder)


def decoder(folder, family, task):
    return without(write_backbone(folder, family, task, pad_token_id=None), "pad_token")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_token_pads_where_there_is_no_padding_token(family, tmp_path):
    backbone = decoder(tmp_path, family, "plain_text")
    assert load_tokenizer(backbone, get_task("plain_text")).pad_token == "</s>"
    assert load_config(backbone, get_task("plain_text")).pad_token_id is None  # the end is still learned


def test_a_tokenizer_is_saved_alike_with_and_without_the_hub(tiny_backbone, tmp_path, monkeypatch):
    """transformers writes down whether it was offline; the same export would have another file."""
    for name, offline in (("with", False), ("without", True)):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        load_tokenizer(str(tiny_backbone), get_task("sst2")).save_pretrained(tmp_path / name)
    first, second = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("with", "without")
    )
    assert first == second


def test_a_tokenizer_with_neither_token_is_one_line(tmp_path):
    backbone = decoder(tmp_path, "llama", "plain_text")
    without(tmp_path, "pad_token", "eos_token")
    with pytest.raises(UserError, match="has no padding token and no end token; add one"):
        load_tokenizer(backbone, get_task("plain_text"))


def test_a_sentencepiece_model_is_enough(tmp_path):
    """The hub's DeBERTa-v3 has no tokenizer.json."""
    import sentencepiece

    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    (tmp_path / "texts").write_text("\n".join(texts))
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(tmp_path / "spm"), vocab_size=40, minloglevel=2, pad_id=0,
        bos_id=1, eos_id=2, unk_id=3, user_defined_symbols="[MASK]", **names,
    )  # fmt: skip
    make_net("deberta-v2").save_pretrained(tmp_path)
    found = load_tokenizer(str(tmp_path), get_task("sst2"))(texts[3])["input_ids"]
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    assert found == [1, *pieces.encode(texts[3]), 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_shards_half_precision_and_any_name_of_a_folder(size, dtype, tmp_path):
    folder, net = tmp_path / "模型 モデル", make_net("llama").to(dtype)
    net.save_pretrained(folder, max_shard_size=size)
    assert (folder / "model.safetensors").exists() == (size == "5GB")
    found = load_net(str(folder), get_task("sst2")).state_dict()
    for name, value in net.state_dict().items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value.float())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("pickled", [False, True])
def test_the_files_that_were_given(dtype, pickled, tmp_path):
    """Safetensors say their dtype themselves, whatever the configuration has; of a pickle only the latter is read."""
    net = make_net("bert").to(getattr(torch, dtype))
    net.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    if pickled:
        torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        size = (tmp_path / "pytorch_model.bin").stat().st_size
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    assert (stored_dtype(tmp_path), net_bytes(tmp_path)) == (dtype, size)
