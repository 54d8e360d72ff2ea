"""As many tokens as a net can read are read, and not one more, in the run and by the export's tokenizer."""

from __future__ import annotations

import importlib
import inspect
import json

import pytest
import torch
import transformers
from mistakes import fails
from tiny import TINY, WORDS, write_backbone

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.models.padding import BEHIND_PADDING, usable_positions

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TABLES = {
    **{name: TINY[name] for name in ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "albert")},
    **{name: TINY[name] for name in ("opt", "bart", "gpt2")},
    **dict.fromkeys(("camembert", "data2vec-text", "esm", "roberta-prelayernorm", "xlm-roberta-xl"), SMALL),
    "longformer": SMALL | {"attention_window": [4]},
    "luke": SMALL | {"entity_vocab_size": 8, "entity_emb_size": 8},
    "xmod": SMALL | {"default_language": "en_XX", "languages": ("en_XX",)},
    "yoso": SMALL,
}  # fmt: skip


def reads(net, length):
    """Say whether a net reads so many tokens, none of which is padding."""
    ids = torch.full((1, length), 7)
    try:
        with torch.no_grad():
            net(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("pad", [0, 1, 3])
@pytest.mark.parametrize("family", TABLES)
def test_a_net_reads_so_many_tokens_and_no_more(family, pad):
    sizes = {"vocab_size": 30, "n_positions" if family == "gpt2" else "max_position_embeddings": 40}
    config = transformers.AutoConfig.for_model(family, **TABLES[family] | sizes | {"pad_token_id": pad})
    net = transformers.AutoModel.from_config(config).eval()
    usable = usable_positions(config)
    assert usable == 40 - (pad + 1 if family != "mpnet" else 2) * (family in BEHIND_PADDING)
    assert reads(net, usable)
    if family not in ("longformer",):  # it pads to its window first, and so it may end earlier or later
        assert not reads(net, usable + 1)


def test_every_text_family_that_counts_behind_padding_is_known():
    """By the code of the installed transformers: all families of AutoModel whose text embeddings do so."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as HEADS

    found = set()
    for family, name in HEADS.items():
        kind = getattr(transformers, name)
        code = inspect.getsource(importlib.import_module(kind.__module__))
        if "create_position_ids_from_input_ids(input_ids" in code and "self.position_embeddings = " in code:
            found.add(family)
    assert found - BEHIND_PADDING == set()


@pytest.fixture
def model(tmp_path):
    """An XLM-R with 24 positions, and a tokenizer that says nothing of them."""
    return write_backbone(tmp_path / "model", "xlm-roberta", "sst2", max_position_embeddings=24, pad_token_id=1)


@pytest.fixture
def data(tmp_path):
    rows = [{"sentence": " ".join(WORDS[: 2 + i] * 3), "label": i % 2} for i in range(12)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_texts_are_cut_to_usable_positions(model, data, capsys):
    found = DataModule("sst2", str(model), str(data))
    assert found.limit == found.max_length == 22
    said = fails(capsys, "validate", model, "--data.task", "sst2", "--data.path", data, "--data.max_length", "23")
    assert "data.max_length: 23 is more than" in said and "the largest is 22" in said


def test_the_tokenizer_of_an_export_cuts_there_too(model, data):
    out, long = data / "out", " ".join(WORDS * 3)
    words = ["--data.task", "sst2", "--data.path", str(data), "--density", "0.5", "--data.max_length", "16"]
    main(["factorize", str(model), str(out), *words])
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 22  # what the net reads, not what the data asked for
    inputs = tokenizer(long, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 22)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True)
    assert net(**inputs).logits.shape == (1, 2)
