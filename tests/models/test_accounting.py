"""One accounting: the spec's BERT-base figures exactly, FLOPs against hand counts, the memory of a forward."""

import pytest
import torch
from tiny import TINY, make_batch, make_net
from torch import nn

from lit_compress.models import accounting as budget
from lit_compress.models.accounting import forward_bytes
from lit_compress.models.cut import cut_units
from lit_compress.models.sites import find_sites, stacks, sublayers
from lit_compress.models.surgery import factorize, without_values
from lit_compress.stages.rank_rule import RankRule


def test_bert_base_totals(bert_base):
    """Spec 1.2: in-block linear, non-embedding and total parameters of BERT-base."""
    assert budget.count_params(bert_base) == budget.Params(84_934_656, 85_646_594, 109_483_778)


def test_zeros_do_not_remain():
    net = make_net()
    linear = net.get_submodule(find_sites(net)[0].name)
    nn.init.zeros_(linear.weight)
    assert budget.density(net) == 1 - 32 * 32 / budget.dense_site_params(net)
    assert budget.stored_density(net) == 1.0


def by_hand(family: str, length: int) -> int:
    """Multiply-adds of a tiny net on one text: Linears of the blocks, attention, then what only this family has."""
    layers = 3 if family == "albert" else 2
    blocks = layers * length * (4 * 32 * 32 + 2 * 32 * 64)
    attention = layers * 2 * length * length * 32  # scores, context
    head = 32 * 32 + 32 * 2  # pooler or dense, and the output layer, on the first token
    projection = length * 16 * 32  # embeddings to the width of the blocks
    positions = layers * 2 * (12 * 32 * 32 + length * 12 * 32)  # query and key of 12 relative ones, and their scores
    seconds = layers * length * 4 * 32 * 32 + blocks + 2 * attention  # cross-attention and the rest of a decoder
    gate = layers * length * 32 * 64
    wider = layers * (length * 2 * 32 * 32 + 2 * length * length * 32)  # q, o, scores and context of heads of 16, not 8
    grouped = length * 32 * 2 + layers * length * (32 * 64 - 2 * 32 * 16)  # gate; keys and values of 2 of 4 heads
    wide_heads = length * 32 * 2 + gate + wider
    others = {"electra": head + projection, "albert": head + projection, "deberta-v2": head + positions,
              **dict.fromkeys(("opt", "gpt2", "gpt_neox"), length * 32 * 2),
              "bart": head + seconds, "t5": head + seconds,
              **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), grouped),
              **dict.fromkeys(("qwen3", "gemma2", "gemma3_text"), wide_heads), "modernbert": head + gate}  # fmt: skip
    return blocks + attention + others.get(family, head)


@pytest.mark.parametrize("family", TINY)
def test_flops_against_a_hand_count(family):
    """2 per multiply-add; ALBERT's shared matrices count at every use."""
    assert budget.flops(make_net(family), 11) == 2 * by_hand(family, 11)


def test_a_vocabulary_of_a_few_tokens():
    assert budget.flops(make_net("llama", "plain_text", vocab_size=4, pad_token_id=1), 3) > 0


def test_shared_matrices_count_once():
    """ALBERT: 6 matrices for 3 layers, in parameters, density and ranks."""
    net = make_net("albert")
    once = 4 * 32 * 32 + 2 * 32 * 64
    assert budget.dense_site_params(net) == budget.count_params(net).sites == once
    assert budget.density(net) == 1.0
    nn.init.zeros_(net.get_submodule(find_sites(net)[0].name).weight)
    assert budget.density(net) == 1 - 32 * 32 / once
    ranks = RankRule(0.5).allocate(net)
    factorize(net, ranks, None)
    assert len(ranks) == 6
    assert budget.stored_density(net) == sum(r * (96 if "ffn" in name else 64) for name, r in ranks.items()) / once


@pytest.mark.parametrize(
    ("family", "numbers"),
    [("bert", 100 + 64 + 2 + 2), ("deberta-v2", 100 + 2 + 12), ("opt", 100 + 66), ("albert", (100 + 64 + 2 + 2) / 2),
     ("modernbert", 100 + 1), ("gpt2", 100 + 64)],
)  # fmt: skip
def test_embeddings_are_left_out(family, numbers):
    """Rows of 32: tokens, positions, segments, LayerNorm; relative positions; ALBERT's rows have 16."""
    params = budget.count_params(make_net(family))
    assert params.total - params.non_embedding == 32 * numbers


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_flops_of_code_that_looks_at_values(family):
    net = make_net(family)
    assert budget.flops(without_values(lambda: type(net)(net.config)), 12) == budget.flops(net, 12)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "deberta-v2"])
def test_flops_by_shapes_alone(family):
    """Also of stacks, whose right factor is applied once, of heads and neurons, and of tied embeddings."""
    settings, task = ({"tie_word_embeddings": True}, "wikitext2") if family == "llama" else ({}, "sst2")
    net, shapes = make_net(family, task, **settings), without_values(lambda: make_net(family, task, **settings))
    found = [budget.shape_flops(shapes, 8)]
    expected = [budget.flops(net, 8)]
    for each in (net, shapes):
        cut_units(each, {part.last: torch.arange(64) < 24 for part in sublayers(each, False) if part.kind == "ffn"})
    found, expected = [*found, budget.shape_flops(shapes, 8)], [*expected, budget.flops(net, 8)]
    stacked = stacks(net)
    for each in (net, shapes):
        factorize(each, dict.fromkeys(stacked, 4), lambda _, w, rank: (w[:, :rank], w[:rank]), stacks=stacked)
    found, expected = [*found, budget.shape_flops(shapes, 8)], [*expected, budget.flops(net, 8)]
    assert found == expected and len(set(found)) == (3 if stacked else 2)
    assert all(value.is_meta for value in shapes.parameters())


def test_measuring_leaves_the_net_as_it_was():
    net, batch = make_net(dropout=0.0).train(), make_batch()
    implementation = net.config._attn_implementation
    budget.measure(net, 8)
    assert net.training and net.config._attn_implementation == implementation
    assert net(input_ids=batch["input_ids"]).logits.requires_grad


def kept_by(net, texts, length):
    """Return the bytes that a real forward of ``net`` keeps for its backward, parameters not counted."""
    own = {value.untyped_storage().data_ptr() for value in [*net.parameters(), *net.buffers()]}
    kept = {}

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        net.train()(input_ids=torch.randint(5, 100, (texts, length)))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_a_forward_of_training_takes_what_is_kept_and_little_more(family):
    net = make_net(family, dropout=0.1)
    found, kept = forward_bytes(net, 8, 32, "parameters"), kept_by(net, 8, 32)
    assert kept <= found < 1.3 * kept


def test_shapes_are_enough_and_nothing_is_changed():
    net = make_net("llama", "wikitext2").train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = forward_bytes(net, 4, 16, "sites")
    empty = without_values(lambda: type(net)(net.config))
    assert forward_bytes(empty, 4, 16, "sites") == found > 0
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("family", TINY)
def test_every_family_has_one(family):
    task = "xsum" if family in ("bart", "t5") else "sst2"
    net = make_net(family, task)
    sizes = [forward_bytes(net, 4, 16, graph) for graph in ("none", "sites", "parameters")]
    assert None not in sizes and 0 < sizes[0] < sizes[1] <= sizes[2]


def test_the_logits_over_a_vocabulary_do_not_count():
    small, large = (make_net("llama", "wikitext2", vocab_size=size) for size in (100, 10_000))
    assert forward_bytes(small, 2, 16, "none") == forward_bytes(large, 2, 16, "none")
    small, large = (make_net("t5", "xsum", vocab_size=size) for size in (100, 10_000))
    assert forward_bytes(large, 2, 16, "none") <= 1.1 * forward_bytes(small, 2, 16, "none")
