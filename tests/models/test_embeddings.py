"""Smaller tables of embeddings: what they compute, which tables are refused."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.layers import Int8Embedding, SizedEmbedding
from lit_compress.models.accounting import count_params
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import factorize, replace
from lit_compress.models.vocabulary import shrink_table, token_table
from lit_compress.utils.errors import UserError


@torch.no_grad()
def logits(net):
    batch = make_batch()
    return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


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


def test_a_narrow_table():
    net = make_net("bert")
    table = SizedEmbedding(100, 32)
    table.weight = net.get_input_embeddings().weight
    replace(net, token_table(net), table)
    before = logits(net.eval())
    shrink_table(net)
    assert isinstance(net.get_input_embeddings(), Int8Embedding)
    assert (logits(net) - before).abs().max() < 0.05


def test_what_cannot_be_made_smaller_is_refused():
    for family, task in (("opt", "wikitext2"), ("t5", "xsum"), ("bart", "sst2")):
        with pytest.raises(UserError, match=r"--embeddings int8: the table .* has other uses"):
            shrink_table(make_net(family, task))
    net = make_net("bert")
    factorize(net, {token_table(net): 24}, None)
    with pytest.raises(UserError, match="of 'bert' is factorized already"):
        shrink_table(net)
