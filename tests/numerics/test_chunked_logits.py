"""Losses of logits in chunks equal those of whole logits, with their gradients. test_output_layer.py has their size."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lit_compress.numerics import chunked_logits
from lit_compress.numerics.chunked_logits import ChunkedLogits, joined, position_losses, summed_linear
from lit_compress.numerics.losses import (
    consistency_loss,
    distillation_loss,
    example_losses,
    logits_losses,
    task_loss,
    token_divergences,
)
from lit_compress.numerics.sampled_labels import draw_labels, fisher_loss

VOCABULARY, WIDTH, TOKENS = 40, 6, 7
NAMES = ("task", "distillation", "consistency")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few positions, the last one shorter."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", 6 * VOCABULARY)


def layer(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, VOCABULARY, dtype=dtype)


def states(seed, batch=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, WIDTH, dtype=dtype, generator=generator).requires_grad_()


def labels_of(batch=3):
    found = torch.randint(VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(5))
    found[1, 3:] = -100
    found[2, ::2] = -100
    return found


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_of_a_training_step(copies, dtype, small_chunks):
    """Labels, a teacher at a temperature, and the consistency of two forwards."""
    own, other, labels = layer(0, dtype), layer(1, dtype), labels_of()
    x, y = states(2, 3 * copies, dtype), states(3, dtype=dtype).detach()
    weights = torch.tensor([0.3, 0.7, 2.0], dtype=dtype)
    options = {"temperature": 3.0, "counted": labels != -100, "copies": copies, "consistency": copies == 2}
    found = logits_losses(
        ChunkedLogits(x, own, VOCABULARY), labels, teacher=ChunkedLogits(y, other, VOCABULARY), **options
    )
    wanted = logits_losses(own(x), labels, teacher=other(y), **options)
    assert list(found) == list(wanted) == list(NAMES[: 1 + copies])
    for name, value in wanted.items():
        assert value > 0.01
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    parameters = (x, *own.parameters())
    gradients = [
        torch.autograd.grad(sum(w * loss for w, loss in zip(weights, terms.values(), strict=False)), parameters)
        for terms in (found, wanted)
    ]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_the_parts_of_a_step_are_the_single_losses():
    """For ordinary logits; so those in chunks are compared with what every other kind of task has."""
    logits, teacher, labels = torch.randn(6, TOKENS, 5), torch.randn(3, TOKENS, 5), labels_of() % 5
    labels[0, 2], counted = -100, torch.rand(3, TOKENS) < 0.5
    found = logits_losses(logits, labels, teacher=teacher, counted=counted, copies=2, consistency=True)
    twice = [torch.cat([each, each]) for each in (labels, teacher, counted)]
    assert torch.equal(found["task"], task_loss(logits, twice[0], "classification"))
    expected = distillation_loss(logits, twice[1], "classification", 2.0, twice[2])
    assert torch.equal(found["distillation"], expected)
    assert torch.equal(found["consistency"], consistency_loss(*logits.chunk(2), "classification", counted))


def test_losses_of_examples_and_divergences(small_chunks):
    own, other, labels = layer(0), layer(1), labels_of()
    x, y = states(2), states(3)
    ours, theirs = ChunkedLogits(x, own, VOCABULARY), ChunkedLogits(y, other, VOCABULARY)
    expected = example_losses(own(x), labels, "classification")
    torch.testing.assert_close(example_losses(ours, labels, "classification"), expected)
    torch.testing.assert_close(task_loss(ours, labels, "classification"), task_loss(own(x), labels, "classification"))
    counted = labels != -100
    p, q = other(y).log_softmax(-1), own(x).log_softmax(-1)
    expected = ((p.exp() * (p - q)).sum(-1)).where(counted, 0.0)
    torch.testing.assert_close(token_divergences(ours, theirs, counted), expected)
    both = joined(ours, ChunkedLogits(y, own, VOCABULARY))
    assert len(both) == 6 and torch.equal(both.chunk(2)[1].states, y)
    assert torch.equal(joined(x, y), torch.cat([x, y]))


@pytest.mark.parametrize("length", [TOKENS, 150])
def test_the_same_draws(length, small_chunks):
    """Of chunks as of whole logits, at once or by the definition: the class at a quantile of the distribution."""
    own, index = layer(0, torch.float32), torch.tensor([7, 2, 30])
    x = 2 * torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(9))
    drawn = draw_labels(own(x), index, seed=4)
    for row, number in enumerate(index.tolist()):
        generator = torch.Generator().manual_seed(4 * 1_000_003 + number)
        uniform = torch.rand(length, 1, generator=generator, dtype=torch.float64)
        below = own(x)[row].double().softmax(-1).cumsum(-1) <= uniform
        assert torch.equal(drawn[row], below.sum(-1).clamp_max(VOCABULARY - 1))
    assert torch.equal(draw_labels(ChunkedLogits(x, own, VOCABULARY), index, seed=4), drawn)
    order = torch.tensor([2, 0])
    assert torch.equal(draw_labels(ChunkedLogits(x[order], own, VOCABULARY), index[order], seed=4), drawn[order])


def test_fisher_loss(small_chunks):
    own, x, labels, index = layer(0), states(2), labels_of(), torch.tensor([4, 0, 9])
    options = {"counted": labels != -100, "index": index, "seed": 3}
    found = fisher_loss(ChunkedLogits(x, own, VOCABULARY), "classification", "drawn", **options)
    wanted = fisher_loss(own(x), "classification", "drawn", **options)
    torch.testing.assert_close(found, wanted)
    for one, two in zip(*(torch.autograd.grad(loss, (x,)) for loss in (found, wanted)), strict=True):
        torch.testing.assert_close(one, two)


def test_the_gradient_of_the_layer_under_autocast(monkeypatch):
    """Its sum over 400 chunks, in float32, is about as exact as that of all positions; in bf16 it is 6 times off."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", 2 * VOCABULARY)
    own, labels = layer(0, torch.float32), torch.full((1, 800), 3)
    x = torch.randn(1, 800, WIDTH, generator=torch.Generator().manual_seed(0))
    exact = torch.autograd.grad(task_loss(own(x), labels, "classification"), own.weight)[0]
    errors = []
    for chunked in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = ChunkedLogits(x, own, VOCABULARY) if chunked else own(x)
            loss = task_loss(logits, labels, "classification")
        assert loss.dtype == torch.float32
        errors.append(float((torch.autograd.grad(loss, own.weight)[0] - exact).norm() / exact.norm()))
    assert errors[0] > 1e-4 and errors[1] < 2 * errors[0]


def test_no_logits_are_kept_for_the_backward(monkeypatch):
    """What all chunks together keep is of the size of hidden states: the logits are computed again."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", 5 * 2000)
    own, kept = nn.Linear(WIDTH, 2000), []
    logits = ChunkedLogits(torch.randn(2, 300, WIDTH, requires_grad=True), own, 2000)
    labels = torch.randint(2000, (2, 300))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss = sum(logits_losses(logits, labels, teacher=logits).values())
        few = sum(kept)
        kept.clear()
        task_loss(own(logits.states), labels, "classification")
    assert few < 600 * 20 and sum(kept) > 600 * 2000
    loss.backward()
    assert own.weight.grad.any()


def test_counted_positions_alone_are_computed():
    """On a CPU; others are 0, whatever the layer would give there."""
    seen = []

    def give(x):
        seen.append(len(x))
        return x

    x, counted = torch.ones(2, 5, 3), torch.zeros(2, 5, dtype=torch.bool)
    counted[1, 3:] = True
    (found,) = position_losses(lambda y: [y.sum(-1)], [ChunkedLogits(x, give, 3)], [], counted)
    assert seen == [2] and torch.equal(found, 3.0 * counted)


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
def test_one_gradient_for_all_uses_of_a_layer(bias, again):
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


def test_other_layers_are_as_they_are():
    layer, _ = layer_and_states()
    with torch.no_grad():
        assert summed_linear(layer) is layer
    assert summed_linear(layer) is not layer
    layer.register_forward_hook(lambda *_: None)
    frozen, other = layer_and_states()[0].requires_grad_(False), nn.Sequential(nn.Linear(IN, OUT))
    assert all(summed_linear(each) is each for each in (layer, frozen, other))
