"""One gradient of a Linear's weight for all chunks: the same values, without a tensor of its size per chunk."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lit_compress.numerics.summed_linear import summed_linear

OUT, IN, CHUNKS = 50, 6, 4


class _Alive(TorchDispatchMode):
    """Counts tensors of the weight's size that operators have made and that are alive, at most at a time."""

    def __init__(self, weight):
        super().__init__()
        self.most = 0
        self.alive = weakref.WeakSet()
        self.weight = weight.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.numel() == OUT * IN:
                self.alive.add(value.untyped_storage())
        self.most = max(self.most, len({s.data_ptr() for s in self.alive} - {self.weight}))
        return output


def layer_and_states(bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=bias, dtype=dtype), torch.randn(12, IN, dtype=dtype, requires_grad=True)


def loss_of(product, states, again=False):
    chunks = states.chunk(CHUNKS)
    return sum((checkpoint(product, c, use_reentrant=False) if again else product(c)).logsumexp(-1).sum()
               for c in chunks)  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_gradients(bias, again):
    layer, states = layer_and_states(bias)
    inputs = (states, *layer.parameters())
    expected = torch.autograd.grad(loss_of(layer, states), inputs)
    loss = loss_of(summed_linear(layer), states, again)
    for _ in range(2):  # nothing of the first backward is in the second
        for one, two in zip(torch.autograd.grad(loss, inputs, retain_graph=not again), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
        loss = loss_of(summed_linear(layer), states, again) if again else loss


def test_one_tensor_of_the_weights_size():
    made = {}
    for name, product in (("plain", lambda layer: layer), ("summed", summed_linear)):
        layer, states = layer_and_states()
        loss = loss_of(product(layer), states)
        with _Alive(layer.weight) as mode:
            loss.backward()
        made[name] = mode.most
    assert made["summed"] == 1 < made["plain"]


def test_under_autocast():
    layer, states = layer_and_states(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (loss_of(product, states) for product in (layer, summed_linear(layer)))
    assert torch.equal(found, expected)
    for one, two in zip(
        *(torch.autograd.grad(loss, (states, layer.weight)) for loss in (found, expected)), strict=True
    ):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


def test_other_layers_are_as_they_are():
    layer, _ = layer_and_states()
    with torch.no_grad():
        assert summed_linear(layer) is layer
    assert summed_linear(layer) is not layer
    layer.register_forward_hook(lambda *_: None)
    frozen, other = layer_and_states()[0].requires_grad_(False), nn.Sequential(nn.Linear(IN, OUT))
    assert all(summed_linear(each) is each for each in (layer, frozen, other))
