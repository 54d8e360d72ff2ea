"""An attention that has lost heads reads their columns of the bias that all layers share."""

from __future__ import annotations

import copy

import torch
from tiny import make_batch, make_net
from torch.utils._python_dispatch import TorchDispatchMode

from lit_compress.layers import SomeHeads
from lit_compress.models.cut import cut_units
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, tell_heads


def logits(net):
    batch = make_batch()
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


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
