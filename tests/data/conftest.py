"""A backbone folder with a tiny vocabulary, and a folder of data files."""

from pathlib import Path

import pytest

from lit_compress.utils import progress

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *"abcdefghij.,", "good", "bad", "film", "##s", "the", "was"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What is read is kept for one test, and noted anew."""
    monkeypatch.setenv("LIT_COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "_noted", set())


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> str:
    """A folder with a config and a tokenizer; 32 positions, no weights."""
    from transformers import BertConfig, BertTokenizer

    folder = tmp_path_factory.mktemp("backbone")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    BertTokenizer(vocab=vocabulary, model_max_length=32).save_pretrained(folder)
    BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, hidden_size=8, num_attention_heads=2).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture
def sst2(tmp_path) -> Path:
    """37 training and 11 validation rows of sst2, of many lengths."""
    folder = tmp_path / "sst2"
    folder.mkdir()
    for split, rows in (("train", 37), ("validation", 11)):
        lines = [f"{'the film was good ' * (row % 5)}{WORDS[5 + row % 10]}\t{row % 2}" for row in range(rows)]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return folder
