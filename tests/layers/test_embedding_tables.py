"""Smaller tables of embeddings: factors and integers, in nets and on disk."""

import torch

from lit_compress.layers import Int8Embedding
from lit_compress.models import surgery


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
