"""Smaller tables of embeddings: what they compute, which rows they favour, which tables are refused."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.layers import Int8Embedding, SizedEmbedding
from lit_compress.models.accounting import count_params
from lit_compress.models.embeddings import shrink_table
from lit_compress.models.sites import token_table
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import replace
from lit_compress.utils.errors import UserError


@torch.no_grad()
def logits(net):
    batch = make_batch()
    return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.parametrize("family", ["bert", "electra", "llama"])
def test_integers(family, tmp_path):
    net = make_net(family).eval()
    before, params, width = logits(net), count_params(net), net.get_input_embeddings().embedding_dim
    error = shrink_table(net, None)
    assert 0 < error < 0.01 and 0 < (logits(net) - before).abs().max() < 0.01
    after = count_params(net)
    assert after.total == params.total + 100 and after.non_embedding == params.non_embedding
    save_net(net, tmp_path)
    again = load_net(tmp_path)
    table = again.get_input_embeddings()
    assert isinstance(table, Int8Embedding) and table.weight.dtype == torch.int8 and table.weight.shape == (100, width)
    assert torch.equal(logits(again), logits(net))


@torch.no_grad()
def test_factors_favour_tokens_that_occur():
    """Minimal weighted error; with the counts the frequent rows are nearer, the others farther."""
    counts = torch.zeros(100)
    counts[:10] = 1000
    tables = []
    for given in (None, counts):
        net = make_net("bert").eval()
        table = net.get_input_embeddings().weight.detach()
        error = shrink_table(net, 6, given)
        found = net.get_input_embeddings()(torch.arange(100))
        assert error == pytest.approx(float((found - table).norm() / table.norm()))
        tables.append((found - table).norm(dim=1).detach())
    assert tables[1][:10].norm() < 0.5 * tables[0][:10].norm() and tables[1][10:].norm() > tables[0][10:].norm()
    u, s, vh = torch.linalg.svd((counts + 1).sqrt()[:, None] * table)
    best = ((u[:, :6] * s[:6]) @ vh[:6]) / (counts + 1).sqrt()[:, None]
    assert torch.allclose(best, found, atol=1e-5)


def test_a_narrow_table():
    net = make_net("bert")
    table = SizedEmbedding(100, 32)
    table.weight = net.get_input_embeddings().weight
    replace(net, token_table(net), table)
    before = logits(net.eval())
    shrink_table(net, 20)
    assert net.get_input_embeddings().rank == 20 and net.get_input_embeddings().padding_idx is None
    assert (logits(net) - before).abs().max() < 0.05


def test_what_cannot_be_made_smaller_is_refused():
    for family, task in (("opt", "wikitext2"), ("t5", "xsum"), ("bart", "sst2")):
        with pytest.raises(UserError, match=r"--embeddings: the table .* has other uses"):
            shrink_table(make_net(family, task), None)
    for rank in (0, 25):
        with pytest.raises(UserError, match=rf"rank {rank} makes no table of 100 x 32 smaller; the largest is 24"):
            shrink_table(make_net("bert"), rank)
    net = make_net("bert")
    shrink_table(net, 24)
    with pytest.raises(UserError, match="of 'bert' is factorized already"):
        shrink_table(net, None)
