"""An attention that has lost heads reads their columns of the bias that all layers share."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import logits
from tiny import make_batch, make_net
from torch.utils._python_dispatch import TorchDispatchMode

from lit_compress.layers import SomeHeads
from lit_compress.models.cut import cut_units
from lit_compress.models.sites import of_kind, sublayers
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, tell_heads


def test_other_heads_in_every_layer_and_again_in_the_second(tmp_path):
    net = make_net("mpnet").eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    name = "mpnet.encoder.layer.{}.attention.attn.o"
    zeroed = copy.deepcopy(net)
    with torch.no_grad():
        for layer, gone in ((0, [0, 2]), (1, [1, 3])):
            for head in gone:
                zeroed.get_parameter(f"{name.format(layer)}.weight")[:, 8 * head : 8 * head + 8] = 0
    cut_units(net, {name.format(0): torch.tensor([False, True, False, True])})
    cut_units(net, {name.format(1): torch.tensor([True, False, True, True])})
    cut_units(net, {name.format(1): torch.tensor([True, True, False])})
    attentions = [module for module in net.modules() if isinstance(module, SomeHeads)]
    assert [attention.heads for attention in attentions] == [[1, 3], [0, 2]]
    assert torch.allclose(logits(net), logits(zeroed), atol=1e-5)
    save_net(net, tmp_path)
    assert torch.equal(logits(load_net(tmp_path)), logits(net))


def test_an_attention_with_all_heads_stays_as_it_is():
    net = make_net("mpnet")
    tell_heads(net, "mpnet.encoder.layer.0.attention.attn", 8, [0, 1, 2, 3])
    assert describe(net) == {}


class Operations(TorchDispatchMode):
    """Notes the names of all operations inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_is_copied_from_the_host():
    """A CUDA graph cannot record an index that a forward makes of numbers in Python."""
    net = make_net("mpnet").eval()
    cut_units(net, {"mpnet.encoder.layer.0.attention.attn.o": torch.tensor([False, True, False, True])})
    attention = net.get_submodule("mpnet.encoder.layer.0.attention.attn")
    with torch.no_grad(), Operations() as seen:
        attention(torch.randn(2, 5, 32), None, torch.randn(2, 4, 5, 5))
    assert "aten.cat.default" in seen.names and not {"aten.index.Tensor", "aten.lift_fresh.default"} & seen.names


@pytest.mark.parametrize("first", ["removed", "two heads", "whole"])
def test_t5_writes_with_a_cache_as_without(first):
    """The first block's attention makes the bias for all others, also where it has no head of its own."""
    net = make_net("t5", "xsum", num_layers=3, initializer_factor=2.0).eval()
    attentions = of_kind(sublayers(net), "attention")
    heads = torch.ones(len(attentions), 4)
    for group, part in enumerate(attentions):  # of the decoder's three blocks, whose cross attentions differ
        heads[group, : group % 4] = 0
        if "block.0" in part.block and part.type == "attention":
            heads[group] = {"removed": 0, "whole": 1}.get(first, torch.tensor([0.0, 1, 0, 1]))
    cut_units(net, {part.last: kept for part, kept in zip(attentions, heads > 0, strict=True)}, whole=True)
    ids = make_batch(size=2)["input_ids"]
    with torch.no_grad():
        encoded = net.get_encoder()(ids)
        step = dict(encoder_outputs=encoded)
        whole = net(**step, decoder_input_ids=ids, use_cache=False).logits
        begun = net(**step, decoder_input_ids=ids[:, :5], use_cache=True)
        ended = net(**step, decoder_input_ids=ids[:, 5:], past_key_values=begun.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([begun.logits, ended.logits], 1), whole, atol=1e-4, rtol=1e-4)
    assert net.generate(ids, max_new_tokens=4).shape[0] == 2
