"""Folders, files and texts that are right but unusual: they give the answers that the model itself gives."""

import json
import random

import torch
from helpers import alone
from tiny import WORDS, make_net, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_compress.__main__ import main


def test_one_token_for_unknown_padding_and_end_and_rows_beyond_the_tokenizer(tmp_path):
    """A vocabulary cut keeps the one token, and the answers; folders and texts are in other letters."""
    place, rng = tmp_path / "\u6a21\u578b \u4e00", random.Random(0)
    words = [*WORDS[:9], "\u0444\u0438\u043b\u044c\u043c", "\u6620\u753b"]
    model, out = place / "\u5927", place / "\u5c0f"
    make_net("gpt2", "sst2", dropout=0.0, initializer_range=0.3, vocab_size=200, pad_token_id=0, eos_token_id=0,
             bos_token_id=0).save_pretrained(model)  # fmt: skip
    pieces = Tokenizer(models.Unigram([(token, -1.0) for token in ["<|end|>", *WORDS, *words[9:]]], unk_id=0))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("unk_token", "pad_token", "eos_token", "bos_token"), "<|end|>")
    PreTrainedTokenizerFast(tokenizer_object=pieces, **special).save_pretrained(model)
    texts = [*(" ".join(rng.choices(words, k=rng.randint(2, 9))) for _ in range(24)), "nobody knows this"]
    rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts)]
    data = write_rows(place / "\u6570\u636e", train=rows, validation=rows, test=rows)
    main(["factorize", str(model), str(out), "--data.task", "sst2", "--data.path", str(data), "--density", "1",
          "--vocabulary", "data"])  # fmt: skip
    assert json.loads((out / "config.json").read_text())["vocab_size"] < 25
    torch.testing.assert_close(alone(out, texts), alone(model, texts), rtol=0, atol=1e-5)
