"""Folders, files and texts that are right but unusual: they give the answers that the model itself gives."""

from __future__ import annotations

import csv
import json
import random

import pytest
import torch
from tiny import WORDS, make_net

from lit_compress.__main__ import main

SCRIPTS = [
    *WORDS,
    "\u0444\u0438\u043b\u044c\u043c",
    "\u0445\u043e\u0440\u043e\u0448\u043e",
    "\u6620\u753b",
    "\u697d\u3057\u3044",
    "\u0641\u064a\u0644\u0645",
]
GROUPED = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 4}


def _alone(folder, texts):
    """Return the probabilities that transformers alone gives single texts, in float32."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        ids = (tokenizer(text, return_tensors="pt", truncation=True, max_length=64) for text in texts)
        return [net(input_ids=i["input_ids"]).logits[0].softmax(-1).max().item() for i in ids]


def _tokenizer(folder, words, **special):
    """Write a tokenizer of whole words whose vocabulary can be cut."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*dict.fromkeys(special.values()), *words]
    pieces = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=pieces, **special).save_pretrained(folder)


def _write(folder, texts):
    """Write texts with labels as CSV, all splits of the same rows."""
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("sentence", "label"), *((t, i % 2) for i, t in enumerate(texts))])
    return folder


def _texts(words, rows=24):
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(2, 9))) for _ in range(rows)]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Fourteen heads on two keys, half precision, many files, folders in Chinese; texts in four scripts, one huge."""
    place = tmp_path_factory.mktemp("unusual") / "\u6a21\u578b \u4e00"
    _tokenizer(place / "大", SCRIPTS, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    net = make_net("llama", "sst2", dropout=0.0, initializer_range=0.3, pad_token_id=1, **GROUPED)
    net.to(torch.bfloat16).save_pretrained(place / "\u5927", max_shard_size="20KB")
    assert len(list((place / "\u5927").glob("*.safetensors"))) > 3
    huge = " ".join(random.Random(1).choices(SCRIPTS, k=300_000))
    _write(place / "\u6570\u636e", [*_texts(SCRIPTS), huge])
    return place


def test_many_half_precision_files_in_folders_of_other_letters(grouped, tmp_path):
    model, data, out = grouped / "\u5927", grouped / "\u6570\u636e", grouped / "\u5c0f"
    main(["factorize", str(model), str(out), "--data.task", "sst2", "--data.path", str(data), "--data.max_length", "64",
          "--density", "0.5", "--method", "LLMPruner", "--vocabulary", "data"])  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    assert report["compressed"]["density"] <= 0.5 and report["vocabulary"]
    main(["predict", str(out), "--data.path", str(data), "--output", str(tmp_path / "p")])
    lines = [json.loads(line) for line in (tmp_path / "p").read_text().splitlines()]
    assert len(lines) == 25 and any("\u6620\u753b" in line["sentence"] for line in lines)
    assert [line["probability"] for line in lines] == pytest.approx(
        _alone(out, [x["sentence"] for x in lines]), abs=1e-4
    )


def test_one_token_for_unknown_padding_and_end_and_rows_beyond_the_tokenizer(tmp_path):
    """A vocabulary cut keeps the one token, and the answers; the model has rows that no token names."""
    model = tmp_path / "model"
    make_net("gpt2", "sst2", dropout=0.0, initializer_range=0.3, vocab_size=200, pad_token_id=0, eos_token_id=0,
             bos_token_id=0).save_pretrained(model)  # fmt: skip
    _tokenizer(model, WORDS, **dict.fromkeys(("unk_token", "pad_token", "eos_token", "bos_token"), "<|end|>"))
    texts = [*_texts(WORDS[:9]), "nobody knows this"]
    data, out = _write(tmp_path / "data", texts), tmp_path / "out"
    main(["factorize", str(model), str(out), "--data.task", "sst2", "--data.path", str(data), "--density", "1",
          "--vocabulary", "data"])  # fmt: skip
    assert json.loads((out / "config.json").read_text())["vocab_size"] < 25
    assert _alone(out, texts) == pytest.approx(_alone(model, texts), abs=1e-5)
