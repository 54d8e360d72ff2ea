"""Cut tokenizers return the same pieces on the texts they were cut for; smaller tables keep the logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import make_batch, make_net, write_bert
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from lit_compress.data.datamodule import DataModule
from lit_compress.export.vocabulary import (
    check_table,
    cut_tokenizer,
    cut_vocabulary,
    keep_tokens,
    shrink_table,
    special_ids,
)
from lit_compress.layers import Int8Embedding
from lit_compress.models.accounting import count_params
from lit_compress.models.storage import load_net, save_net
from lit_compress.tasks.records import Custom
from lit_compress.tasks.sentences import Pooling
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


KEPT = [0, 1, 2, 3, 4, *range(7, 100, 3)]
KINDS = {
    **{family: "sst2" for family in ("bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert",
                                     "opt", "llama", "bart", "t5")},
    "squad": "squad",
}  # fmt: skip


@torch.no_grad()
def logits(net, ids=None, mask=None):
    batch = make_batch()
    ids, mask = (batch["input_ids"], batch["attention_mask"]) if ids is None else (ids, mask)
    output = net(input_ids=ids, attention_mask=mask)
    return output.logits if "logits" in output else output.start_logits


@pytest.mark.parametrize("family", KINDS)
def test_same_logits(family):
    net = make_net("bert" if family == "squad" else family, KINDS[family]).eval()
    small = keep_tokens(net, KEPT)
    batch = make_batch()
    ids, kept = batch["input_ids"] % len(KEPT), torch.tensor(KEPT)
    ids[:, :-1] = ids[:, :-1].clamp_min(5)  # no special tokens within
    ids[:, -1] = 2
    found, expected = (logits(n, i, batch["attention_mask"]) for n, i in ((small, ids), (net, kept[ids])))
    assert torch.allclose(found, expected, atol=1e-6)
    assert small.config.vocab_size == len(KEPT) and net.config.vocab_size == 100
    rows = sum(p.shape[0] == 100 for p in net.parameters())
    assert sum(p.shape[0] == len(KEPT) for p in small.parameters()) == rows >= 1
    assert not any(p.shape[0] == 100 for p in small.parameters())


@pytest.mark.parametrize("family", ["opt", "qwen3", "llama", "bart", "t5"])
def test_output_layers_and_special_ids(family, tmp_path):
    """Logits of the kept tokens are the same; the ends of texts have their new ids."""
    net = make_net(family, "xsum" if family in ("bart", "t5") else "wikitext2").eval()
    net.generation_config.eos_token_id = [2, 7]
    net.config.eos_token_id = 2
    net.generation_config.bad_words_ids, net.generation_config.suppress_tokens = [[7, 3], [4]], [4, 10]  # 4 goes
    net.generation_config.begin_suppress_tokens = [4]
    net.generation_config.sequence_bias = [[[7, 3], 2.0], [[4, 3], 1.0]]
    if family == "bart":
        net.final_logits_bias += torch.randn(100)
    kept = [1, 0, 2, 7, 3, *range(10, 100, 3)]
    assert special_ids(net) <= set(kept)
    small = keep_tokens(net, kept)
    assert small.generation_config.eos_token_id == [2, 3]
    assert (small.generation_config.bad_words_ids, small.generation_config.suppress_tokens) == ([[3, 4]], [5])
    assert small.generation_config.begin_suppress_tokens is None
    assert small.generation_config.sequence_bias == [[[3, 4], 2.0]]
    assert small.config.pad_token_id == kept.index(net.config.pad_token_id)
    assert small.config.vocab_size == len(kept) == small.get_output_embeddings().weight.shape[0]
    tied = [n.get_output_embeddings().weight is n.get_input_embeddings().weight for n in (net, small)]
    assert tied[0] == tied[1] == (family != "llama")
    save_net(small, tmp_path)
    again = load_net(tmp_path)
    ids = torch.randint(5, len(kept), (2, 6))
    more = {"decoder_input_ids": ids[:, :2]} if small.config.is_encoder_decoder else {}
    before = {name: torch.tensor(kept)[value] for name, value in more.items()}
    with torch.no_grad():
        expected = net(input_ids=torch.tensor(kept)[ids], **before).logits[..., kept]
        for found in (small(input_ids=ids, **more).logits, again(input_ids=ids, **more).logits):
            assert torch.allclose(found, expected, atol=1e-6)


def test_positions_that_follow_an_id_are_refused():
    """RoBERTa counts positions from the id of padding: it may not move."""
    assert keep_tokens(make_net("roberta"), [0, 1, 2, *range(9, 60)]).config.pad_token_id == 1
    with pytest.raises(UserError, match="the logits of RobertaForSequenceClassification differ"):
        keep_tokens(make_net("roberta"), [0, 2, 3, 1, *range(9, 60)])


@pytest.mark.parametrize("family", ["bert", "electra", "llama"])
def test_integers(family, tmp_path):
    net = make_net(family).eval()
    before, params, width = logits(net), count_params(net), net.get_input_embeddings().embedding_dim
    error = shrink_table(net)
    assert 0 < error < 0.01 and 0 < (logits(net) - before).abs().max() < 0.01
    after = count_params(net)
    assert after.total == params.total + 100 and after.non_embedding == params.non_embedding
    save_net(net, tmp_path)
    again = load_net(tmp_path)
    table = again.get_input_embeddings()
    assert isinstance(table, Int8Embedding) and table.weight.dtype == torch.int8 and table.weight.shape == (100, width)
    assert torch.equal(logits(again), logits(net))


def test_what_cannot_be_made_smaller_is_refused():
    assert check_table(make_net("bert")) == "bert.embeddings.word_embeddings"
    for family, task in (("opt", "wikitext2"), ("t5", "xsum"), ("bart", "sst2")):
        with pytest.raises(UserError, match=r"--embeddings int8: the table .* has other uses"):
            shrink_table(make_net(family, task))


def test_all_prompts_of_a_sentence_model_stay(tmp_path):
    """Also those that no training text begins with."""
    (tmp_path / "texts.csv").write_text("text\n" + f"{TEXTS[1]}\n" * 20)
    net, prompt = write_bert(tmp_path / "net", "stsb_embedding"), "interesting plot of "
    data = DataModule("custom", str(net), str(tmp_path / "texts.csv"), custom=Custom("embedding"))
    data.record = replace(data.record, pooling=Pooling(prompts=(("query", prompt), ("", "")), max_length=16))
    data.tokenizer = wordpiece(tmp_path)
    small, other, facts = cut_vocabulary(make_net("bert", "stsb_embedding", vocab_size=300), data)
    assert facts["rows"] < len(data.tokenizer) and small.config.vocab_size == facts["rows"]
    assert other.tokenizer.tokenize(prompt) == data.tokenizer.tokenize(prompt)
    assert other.tokenizer.tokenize("charmless") != data.tokenizer.tokenize("charmless")
