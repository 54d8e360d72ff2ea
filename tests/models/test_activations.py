"""The memory of a forward: on tensors without values as on real ones, whatever the family."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY, make_net

from lit_compress.models.accounting import forward_bytes
from lit_compress.models.shapes import without_values
from lit_compress.stages.lora import LoRA, Retraining, add_updates


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


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_a_forward_of_training_takes_what_is_kept_and_little_more(family, lora):
    """Also of matrices with a low-rank update."""
    net = make_net(family, dropout=0.1)
    if lora:
        add_updates(net, Retraining(parameters="lora", lora=LoRA(rank=2)), seed=0)
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


def test_texts_count_in_proportion_and_16_bits_take_less():
    net = make_net("bert")
    one, two = (forward_bytes(net, texts, 16, "parameters") for texts in (8, 16))
    assert 1.9 * one < two < 2.1 * one
    assert forward_bytes(net, 8, 16, "parameters", half=True) < one


def test_the_logits_over_a_vocabulary_do_not_count():
    small, large = (make_net("llama", "wikitext2", vocab_size=size) for size in (100, 10_000))
    assert forward_bytes(small, 2, 16, "none") == forward_bytes(large, 2, 16, "none")
    small, large = (make_net("t5", "xsum", vocab_size=size) for size in (100, 10_000))
    assert forward_bytes(large, 2, 16, "none") <= 1.1 * forward_bytes(small, 2, 16, "none")
