"""One accounting: the spec's BERT-base figures exactly, FLOPs against hand counts, ranks for a budget."""

import pytest
import torch
from tiny import TINY, make_batch, make_net
from torch import nn

from lit_compress import budget
from lit_compress.errors import UserError
from lit_compress.families import find_sites
from lit_compress.surgery import factorize


@pytest.fixture(scope="module")
def bert_base():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_labels=2))


def test_bert_base_totals(bert_base):
    """Spec 1.2: in-block linear, non-embedding and total parameters of BERT-base."""
    assert budget.count_params(bert_base) == budget.Params(84_934_656, 85_646_594, 109_483_778)


@pytest.mark.parametrize(("rank", "sites"), [(260, 43_130_880), (253, 41_969_664), (130, 21_565_440), (80, 13_271_040)])
def test_bert_base_fixed_ranks(bert_base, rank, sites):
    """Invariant 9: the published sizes."""
    ranks = budget.allocate_ranks(bert_base, 0.25, rank)
    shapes = {site.name: bert_base.get_submodule(site.name) for site in find_sites(bert_base)}
    assert sum(rank * (m.out_features + m.in_features) for n, m in shapes.items() if n in ranks) == sites
    assert len(ranks) == 72


def test_rank_390_keeps_square_matrices_dense(bert_base):
    """Invariant 9: 390 > 384 would make 768 x 768 larger; those stay dense, 75.7 % remain."""
    ranks = budget.allocate_ranks(bert_base, 0.75, 390)
    assert len(ranks) == 24
    assert pytest.approx(0.757, abs=1e-3) == (48 * 768**2 + 24 * 390 * (768 + 3072)) / 84_934_656


def test_rank_that_saves_nothing_is_one_line():
    with pytest.raises(UserError, match=r"rank: 22 makes no matrix smaller; the largest rank that does is 21"):
        budget.allocate_ranks(make_net(), 0.5, 22)  # 32 x 64: break-even 21.3


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 0.9])
def test_density_is_met_and_never_exceeded(density):
    net = make_net()
    factorize(net, budget.allocate_ranks(net, density), None)
    assert density - 0.08 < budget.stored_density(net) <= density  # 32 x 32: one rank is 6 %
    assert budget.stored_density(net) == budget.count_params(net).sites / budget.dense_site_params(net)


def test_density_one_keeps_every_matrix():
    assert budget.allocate_ranks(make_net(), 1.0) == {}


def test_zeros_do_not_remain():
    net = make_net()
    linear = net.get_submodule(find_sites(net)[0].name)
    nn.init.zeros_(linear.weight)
    assert budget.density(net) == 1 - 32 * 32 / budget.dense_site_params(net)
    assert budget.stored_density(net) == 1.0


@pytest.mark.parametrize("family", TINY)
def test_flops_against_a_hand_count(family):
    """2 per multiply-add: every Linear of a token, both attention products, pooler and head once per text."""
    net, length = make_net(family), 11
    linears = 2 * length * budget.dense_site_params(net)
    attention = 2 * 2 * 2 * length * length * 32  # layers x (scores, context) x 2
    head = 2 * (32 * 32 + 32 * 2)  # pooler or dense, and the output layer, on the first token
    assert budget.flops(net, length) == linears + attention + head


def test_flops_shrink_with_the_rank():
    net = make_net()
    dense = budget.flops(net, 8)
    ranks = budget.allocate_ranks(net, 0.5)
    removed = sum(
        net.get_submodule(n).weight.numel() - r * sum(net.get_submodule(n).weight.shape) for n, r in ranks.items()
    )
    factorize(net, ranks, None)
    assert dense - budget.flops(net, 8) == 2 * 8 * removed


def test_latency_is_interleaved_and_restores_threads():
    nets = [make_net(), make_net()]
    before = torch.get_num_threads()
    first, second = budget.latency(nets, length=8, repeats=6)
    assert torch.get_num_threads() == before
    assert first["p10"] <= first["median"] <= first["p90"]
    assert {"batch", "length", "threads"} < second.keys()


def test_measuring_leaves_the_net_as_it_was():
    net, batch = make_net(dropout=0.0).train(), make_batch()
    implementation = net.config._attn_implementation
    budget.measure(net, 8)
    assert net.training and net.config._attn_implementation == implementation
    assert net(input_ids=batch["input_ids"]).logits.requires_grad
