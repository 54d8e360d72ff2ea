"""Cut tokenizers: the same pieces on the texts they were cut for, no unknown words where there were none."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from lit_compress.export.vocabulary import cut_tokenizer
from lit_compress.utils.errors import UserError

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = [
    "the plot of this film is not interesting, but the acting is great",
    "a warm and charming story about two brothers who are lost at sea",
    "interest in the actors interacts with the plotting of the charmless brotherhood",
    "unbelievable! nobody believed the believer, not even the warmest of the charmed",
    "Seashore stories bore the boring, the bored and the boar",
] * 4
USED = TEXTS[:2]
UNSEEN = ["the believers charm nobody", "boredom at the seashore!", "plot", "a ghastly rhythm", ""]


def trained(pieces, trainer):
    pieces.train_from_iterator(TEXTS, trainer)
    return pieces


def wordpiece(folder):
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    letters = list("abcdefghijklmnopqrstuvwxyz!,")
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=[*special, *inner, *letters], show_progress=False
    )
    return BertTokenizer(vocab=trained(pieces, trainer).get_vocab())


def byte_bpe(folder):
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained(pieces, trainer).post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return fast(pieces)


def unigram(folder, fallback=False):
    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False,
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz"),
    )  # fmt: skip
    trained(pieces, trainer).post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return fast(pieces)


def sentence_bpe(folder):
    """Llama's: one word is the whole text, several merges make one piece, unknown characters become bytes."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))],
    )  # fmt: skip
    state = json.loads(trained(pieces, trainer).to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    pairs = [[p[:i], p[i:]] for p in vocab for i in range(1, len(p)) if p[:i] in vocab and p[i:] in vocab]
    state["model"]["merges"] = merges + [pair for pair in pairs if pair not in merges]
    tokenizer = fast(Tokenizer.from_str(json.dumps(state)))
    tokenizer.add_tokens(["<extra>"], special_tokens=True)  # no piece of the model: its id is behind all pieces
    return tokenizer


def fast(pieces):
    names = dict(zip(("bos", "pad", "eos", "unk", "mask"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **{f"{k}_token": v for k, v in names.items()})


def ids_of(tokenizer, texts):
    return {number for ids in tokenizer(texts)["input_ids"] for number in ids}


@pytest.mark.parametrize("make", [wordpiece, byte_bpe, unigram, sentence_bpe])
def test_same_pieces_and_no_new_unknown_words(make, tmp_path):
    big = make(tmp_path)
    small, kept = cut_tokenizer(big, ids_of(big, USED))
    assert len(small) == len(kept) < len(big) and len(set(kept)) == len(kept)
    assert small.convert_ids_to_tokens(range(len(kept))) == big.convert_ids_to_tokens(kept)
    for text in USED:
        assert [kept[i] for i in small(text)["input_ids"]] == big(text)["input_ids"]
    pair = [tokenizer(*USED) for tokenizer in (big, small)]
    assert [kept[i] for i in pair[1]["input_ids"]] == pair[0]["input_ids"]
    assert {k: v for k, v in pair[0].items() if k != "input_ids"} == {
        k: v for k, v in pair[1].items() if k != "input_ids"
    }
    for text in UNSEEN:
        pieces = small(text)["input_ids"]
        assert big.unk_token_id in big(text)["input_ids"] or small.unk_token_id not in pieces
        said = [t.decode(t(text)["input_ids"], skip_special_tokens=True).replace(" ", "") for t in (small, big)]
        assert said[0] == said[1]
    assert any(len(small(text)["input_ids"]) > len(big(text)["input_ids"]) for text in UNSEEN)
    for name in ("pad", "unk", "mask"):
        assert kept[getattr(small, f"{name}_token_id")] == getattr(big, f"{name}_token_id")
    small.save_pretrained(tmp_path / "small")
    again = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert [again(text)["input_ids"] for text in UNSEEN] == [small(text)["input_ids"] for text in UNSEEN]
    assert all(kept[again.convert_tokens_to_ids(t)] == big.convert_tokens_to_ids(t) for t in big.all_special_tokens)


def test_a_piece_with_a_letter_of_no_piece_is_kept(tmp_path):
    """ア is no piece by itself: what has it stays whole, so that the word is not unknown."""
    words = {
        w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##a", "##b", "##bア", "ab"])
    }
    big = BertTokenizer(vocab=words)
    small, kept = cut_tokenizer(big, ids_of(big, ["a"]))
    assert small.convert_ids_to_tokens(range(len(kept))) == [w for w in words if w != "ab"]
    assert small.tokenize("abア ab") == ["a", "##bア", "a", "##b"]


def test_other_kinds_are_refused(tiny_backbone):
    pieces = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words = PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>")
    with pytest.raises(UserError, match="type WordLevel cannot be cut; those that can: WordPiece, BPE, Unigram"):
        cut_tokenizer(words, {1})
    ends = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    with pytest.raises(UserError, match="BPE with end_of_word_suffix '</w>' cannot be cut"):
        cut_tokenizer(PreTrainedTokenizerFast(tokenizer_object=ends), {0})
