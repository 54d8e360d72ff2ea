"""Rankings of rows: the export computes what the zeroed net does, is as large as counted, and as was asked for."""

import pytest
import torch
from helpers import logits
from tiny import ALL, make_net

from lit_compress.export.fuse import fuse
from lit_compress.layers import LowRankSparseLinear
from lit_compress.models.accounting import count_params, dense_site_params
from lit_compress.models.row_sizes import RowSizes
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, factorize

FAMILIES = ["bert", "distilbert", "mpnet", "albert", "deberta-v2-own-positions", "opt", "gpt2", "gpt_neox", "llama",
            "llama-one-key", "qwen3", "gemma2", "phi3", "modernbert-biases", "bart-uneven", "t5-gated"]  # fmt: skip


def pruned(net, ranks, keep, biases_go=False):
    """Give ``net`` random values, of which only the rows ``keep`` stay."""
    pruned = factorize(net.eval(), ranks, None, LowRankSparseLinear)
    with torch.no_grad():
        for name, p in pruned.named_parameters():
            p.normal_(1.0 if "norm" in name.lower() else 0.0, 0.3)
        for site in find_sites(pruned):
            layer = pruned.get_submodule(site.name)
            own, keep = keep.tensor_split([layer.out_features])
            layer.sparse *= own[:, None]
            if biases_go and layer.bias is not None:
                layer.bias *= own
    return pruned


def stored(net, ranks, keep, biases_go=False):
    """The weights of the export of ``net`` with the rows ``keep``, counted in the model itself."""
    return count_params(fuse(pruned(net, ranks, keep, biases_go))).sites


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biases_go", [False, True])
def test_the_export_is_the_zeroed_net_and_as_large_as_counted(family, biases_go, tmp_path):
    """ITP's invariant. Few rows leave whole heads and neurons constant, and attentions without a living head."""
    name, settings = ALL[family]
    for density in (0.02, 0.3, 0.8):
        net = make_net(name, dropout=0.0, **settings)
        sizes, ranks = RowSizes(net, biases_go=biases_go), {site.name: 0 for site in find_sites(net)}
        keep = torch.rand(sizes.rows, generator=torch.Generator().manual_seed(1)) < density
        zeroed = pruned(net, ranks, keep, biases_go)
        fused = fuse(zeroed)
        torch.testing.assert_close(logits(fused), logits(zeroed), atol=1e-4, rtol=1e-4)
        assert int(sizes.stored(keep)) == count_params(fused).sites
    assert sizes.total == dense_site_params(net) == int(sizes.stored(torch.ones_like(keep)))
    save_net(fused, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(fused) and torch.equal(logits(again), logits(fused))
    assert torch.equal(logits(fuse(again)), logits(again))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_what_is_asked_is_stored(family, density):
    """From below, and nearer than one row with the column that reads it: 32 + 32 weights, gated 64 + 32."""
    name, settings = ALL[family]
    net = make_net(name, **settings)
    sizes = RowSizes(net)
    scores = torch.rand(sizes.rows, generator=torch.Generator().manual_seed(2))
    budget = round(density * sizes.total)
    keep = sizes.choose(scores, budget)
    found = stored(net, {site.name: 0 for site in find_sites(net)}, keep)
    assert budget - 96 < found <= budget


def test_factors_count_too():
    net = make_net()
    ranks = {site.name: 3 for site in find_sites(net)}
    sizes = RowSizes(net, ranks)
    keep = sizes.choose(torch.rand(sizes.rows), 8000)
    assert 8000 - 64 < sizes.stored(keep) <= 8000
    assert not sizes.choose(torch.rand(sizes.rows), 100).any()
    assert int(sizes.stored(keep)) == stored(net, ranks, keep)
    assert int(sizes.stored(keep & False)) == stored(make_net(), ranks, keep & False)
