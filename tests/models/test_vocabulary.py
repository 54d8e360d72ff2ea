"""Smaller tables: nets with fewer tokens and their logits, ids and output layers; rows of integers."""

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.layers import Int8Embedding
from lit_compress.models.accounting import count_params
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.vocabulary import keep_tokens, shrink_table, special_ids
from lit_compress.utils.errors import UserError

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
    if family == "bart":
        net.final_logits_bias += torch.randn(100)
    kept = [1, 0, 2, 7, 3, *range(10, 100, 3)]
    assert special_ids(net) <= set(kept)
    small = keep_tokens(net, kept)
    assert small.generation_config.eos_token_id == [2, 3]
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
    for family, task in (("opt", "wikitext2"), ("t5", "xsum"), ("bart", "sst2")):
        with pytest.raises(UserError, match=r"--embeddings int8: the table .* has other uses"):
            shrink_table(make_net(family, task))
