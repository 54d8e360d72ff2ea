"""Smaller tables of embeddings: factors and integers, in nets and on disk."""

import pytest
import torch
from tiny import make_batch, make_net
from torch import nn

from lit_compress.layers import Int8Embedding, LowRankEmbedding
from lit_compress.models import storage, surgery
from lit_compress.models.accounting import count_params, whole_density
from lit_compress.models.sites import embedding_params
from lit_compress.models.vocabulary import token_table
from lit_compress.numerics.decompose import decompose


def test_rows_of_the_product():
    torch.manual_seed(0)
    table = nn.Embedding(20, 6, padding_idx=3).double()
    layer = LowRankEmbedding.from_factors(table, torch.randn(20, 2).double(), torch.randn(2, 6).double())
    ids = torch.tensor([[3, 5], [19, 0]])
    assert torch.allclose(layer(ids), (layer.left @ layer.right)[ids])
    layer(ids).sum().backward()
    assert not layer.left.grad[3].any() and layer.left.grad[5].any()  # as in the table
    assert surgery.spec_of(layer) == {
        "kind": "low_rank_embedding",
        "num_embeddings": 20,
        "width": 6,
        "rank": 2,
        "padding_idx": 3,
    }


def factorized(net, rank):
    name = token_table(net)
    return surgery.factorize(net, {name: rank}, lambda _, weight, k: decompose(weight, k)), name


@pytest.mark.parametrize("family", ["bert", "electra", "deberta-v2"])
def test_at_full_rank_nothing_changes_and_it_is_reloaded(family, tmp_path):
    net, batch = make_net(family, dropout=0.0).eval(), make_batch()
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    before, total = net(**inputs).logits, count_params(net).total
    width, tokens = net.get_input_embeddings().embedding_dim, net.config.vocab_size
    net, name = factorized(net, width)
    assert torch.allclose(net(**inputs).logits, before, atol=1e-5)
    assert count_params(net).total == total + width * width
    assert sum(p.numel() for p in embedding_params(net)) == count_params(net).total - count_params(net).non_embedding
    assert whole_density(net) == pytest.approx((total + width**2) / total)
    storage.save_net(net, tmp_path)
    again = storage.load_net(tmp_path)
    assert again.get_submodule(name).num_embeddings == tokens
    assert torch.equal(again(**inputs).logits, net(**inputs).logits)


def test_a_table_with_other_uses_is_none():
    assert token_table(make_net("t5", "xsum")) is None and token_table(make_net("opt", "wikitext2")) is None
    assert token_table(make_net("bert")) == "bert.embeddings.word_embeddings"
    assert token_table(make_net("llama")) == "model.embed_tokens"


def test_rows_are_off_by_half_a_step():
    torch.manual_seed(0)
    table = torch.randn(20, 6) * torch.logspace(-4, 4, 20)[:, None]
    table[3] = 0
    layer = Int8Embedding.from_table(table)
    ids = torch.tensor([[3, 5], [19, 0]])
    naive = torch.stack([torch.stack([layer.weight[i].float() * layer.scale[i] for i in row]) for row in ids.tolist()])
    assert torch.equal(layer(ids), naive) and layer.weight.dtype == torch.int8
    off = (layer(torch.arange(20)) - table).abs()
    assert (off <= 0.501 * table.abs().amax(1, keepdim=True) / 127).all() and not off[3].any()
    assert (layer.weight.abs().amax(1) == 127).sum() == 19
    assert surgery.spec_of(layer) == {"kind": "int8_embedding", "num_embeddings": 20, "width": 6}
