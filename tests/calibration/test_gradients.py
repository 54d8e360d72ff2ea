"""Fisher sums, mean gradients and mean squares against a loop over single examples."""

from __future__ import annotations

import pytest
import torch
from in_memory import batch_of as examples
from in_memory import cut, estimate_fisher, mean_gradients
from tiny import ALL, SOFTMAX_IN_FLOAT32, make_batch, make_net
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_compress.calibration import gradients, statistics
from lit_compress.calibration.gradients import Fisher
from lit_compress.calibration.statistics import row_parts
from lit_compress.models.sites import find_sites
from lit_compress.numerics.losses import example_losses
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make(variant="bert", task="sst2", **settings):
    """A float64 net whose gradients are well above rounding, its biases and LayerNorms not at 0 and 1; its sites."""
    family, more = ALL[variant]
    net = make_net(family, task, **more, **settings).double()
    generator = torch.Generator().manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.1, generator=generator)
    return net, [site.name for site in find_sites(net)]


def batch_of(net, size=5):
    return examples(net, size=size)


def loop(net, batches, sites):
    """Mean of the squares of weight.grad, one backward per example, by plain autograd."""
    net.eval()
    squares = dict.fromkeys(sites, 0.0)
    parts = [part for b in batches for part in cut(b, *[1] * len(b["labels"]))]
    for part in parts:
        net.zero_grad()
        logits = net(**{name: part[name] for name in INPUTS if name in part}).logits
        example_losses(logits, part["labels"], "classification").mean().backward()
        for name in sites:
            squares[name] = squares[name] + net.get_submodule(name).weight.grad ** 2
    net.zero_grad()
    return {name: square / len(parts) for name, square in squares.items()}


def check(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, square in expected.items():
        assert square.max() > 0, name
        value, means = found[name], square.mean(0)
        assert value.dtype == torch.float64 and value.shape == means.shape
        torch.testing.assert_close(value, means.double(), rtol=tolerance, atol=tolerance * float(means.max()))


@pytest.mark.parametrize("variant", ["bert", "albert", "deberta-v2", "opt", "bart", "t5"])
def test_equals_the_loop(variant):
    """Invariant 12: every kind of use of a matrix, padded texts, batches of 1, 2 and 4.

    Every family goes the same way in test_moments.py.
    """
    net, sites = make(variant)
    batch = batch_of(net, 4)
    expected, tolerance = loop(net, [batch], sites), 1e-5 if variant in SOFTMAX_IN_FLOAT32 else 1e-10
    for sizes in ((4,), (2, 2), (1, 1, 1, 1)):
        found = estimate_fisher(net, cut(batch, *sizes), "classification", sites)
        check(found, expected, tolerance)


@pytest.mark.parametrize("limit", [0.0, torch.inf])
@pytest.mark.parametrize("variant", ["bert", "albert", "deberta-v2", "opt"])
def test_both_forms_are_exact(variant, limit, monkeypatch):
    """Everything by the gradients themselves, everything by the Gram matrices; one example at a time."""
    monkeypatch.setattr(gradients, "break_even_rank", lambda *_: limit)
    net, sites = make(variant)
    batch = batch_of(net)
    expected = loop(net, [batch], sites)
    check(estimate_fisher(net, [batch], "classification", sites), expected)
    monkeypatch.setattr(gradients, "_CHUNK_CPU", 1)
    check(estimate_fisher(net, [batch], "classification", sites), expected)


@pytest.mark.parametrize(("tokens", "gram"), [(21, True), (22, False)])
def test_the_cheaper_form_is_taken(tokens, gram):
    """Break-even of 32 x 64 is 21.3 tokens; two uses stand behind each other."""
    x, delta = torch.randn(3, tokens, 64), torch.randn(3, tokens, 32)
    uses = [(x[:, :4], delta[:, :4]), (x[:, 4:], delta[:, 4:])]
    with FlopCounterMode(display=False) as counter:
        (sums := Fisher(torch.zeros(64).double(), 32)).add(uses)
    per_example = tokens**2 * 96 if gram else tokens * 32 * 64
    assert counter.get_total_flops() == 2 * 3 * per_example
    gradient = torch.einsum("sto,sti->soi", delta, x).double()
    torch.testing.assert_close(sums.total, (gradient**2).sum((0, 1)), rtol=1e-4, atol=0)


def test_rounding_never_gives_a_negative_sum():
    """Gradients that are zero up to rounding, in the Gram form."""
    u, v, x = torch.randn(1, 9, 1), torch.randn(1, 1, 32), torch.randn(1, 9, 64)
    x = x - u * (u.mT @ x) / (u.mT @ u)
    sums = Fisher(torch.zeros(64).double(), 32)
    sums.add([(x, u * v)])
    assert sums.total.min() < 0
    found = sums.mean(1.0)
    assert found.min() == 0 and found.max() < 1e-4


def test_no_gradient_of_a_weight_is_computed():
    """Forward and half a backward; and what no longer is needed goes: the last layer is reduced first."""
    net, sites = make()
    batch, order = batch_of(net), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fisher, "add", lambda sums, uses: order.append((sums.outputs, len(sums.total), len(uses))))
        with FlopCounterMode(display=False) as counter:
            estimate_fisher(net, [batch], "classification", sites)
    with FlopCounterMode(display=False) as plain:
        net(**{name: batch[name] for name in INPUTS if name in batch}).logits.sum().backward()
    linears = 2 * 5 * 9 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert plain.get_total_flops() - counter.get_total_flops() > linears
    assert order[:2] == [(32, 64, 1), (64, 32, 1)]


def test_some_sites_only():
    """The graph begins at the first of them; the others cost nothing."""
    net, sites = make("deberta-v2")
    batch = batch_of(net)
    chosen = [sites[7], sites[2]]
    found = estimate_fisher(net, [batch], "classification", chosen)
    assert list(found) == chosen
    check(found, loop(net, [batch], chosen))


@pytest.mark.parametrize("fails", [False, True])
def test_the_net_is_left_as_it_was(fails):
    """Invariant 15: modes, requires_grad, gradients, hooks; also after an error in the middle."""
    net, sites = make("deberta-v2")
    net.train()
    net.get_submodule(sites[0]).eval()
    frozen, held = net.get_submodule(sites[1]).weight.requires_grad_(False), net.classifier.weight
    held.grad = torch.ones_like(held)
    before = {name: p.detach().clone() for name, p in net.state_dict().items()}
    batches = [batch_of(net), {"input_ids": torch.zeros(1, 1)}] if fails else [batch_of(net)]
    hook = net.get_submodule(sites[0]).register_forward_hook(lambda *_: None)
    if fails:
        with pytest.raises(UserError, match="labels"):
            estimate_fisher(net, batches, "classification", sites)
    else:
        estimate_fisher(net, batches, "classification", sites)
    assert [name for name, m in net.named_modules() if not m.training] == [sites[0]]
    assert [p is frozen for p in net.parameters() if not p.requires_grad] == [True]
    assert [p is held for p in net.parameters() if p.grad is not None] == [True]
    assert torch.equal(held.grad, torch.ones_like(held))
    assert [list(m._forward_hooks) for m in net.modules() if m._forward_hooks] == [[hook.id]]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_matrix_without_gradient_is_zero():
    """A dead unit and a matrix whose output goes nowhere have no Fisher information, and break nothing."""
    net, sites = make()
    net.bert.encoder.layer[1].output.dense.weight.data.zero_()
    net.bert.encoder.layer[1].attention.output.dense.weight.data.zero_()
    found = estimate_fisher(net, [batch_of(net)], "classification", sites)
    for name in ("attention.self.query", "attention.self.value", "intermediate.dense"):
        entry = found[f"bert.encoder.layer.1.{name}"]
        assert entry.eq(0).all()
    net.register_module("aside", nn.Linear(32, 4, dtype=torch.float64))
    net.bert.encoder.layer[0].register_forward_hook(lambda module, args, out: (net.aside(args[0]), out)[1])
    unused = estimate_fisher(net, [batch_of(net)], "classification", ["aside"])["aside"]
    assert unused.shape == (32,) and unused.eq(0).all()


def test_one_of_two_uses_without_influence():
    """The other use still counts."""
    net, sites = make()
    batch, first = batch_of(net), net.get_submodule(sites[0])
    expected = loop(net, [batch], sites)
    net.bert.pooler.register_forward_hook(lambda *_: (first(torch.ones(5, 2, 32, dtype=torch.float64)), None)[1])
    check(estimate_fisher(net, [batch], "classification", sites), expected)


def test_errors():
    net, sites = make()
    batch = batch_of(net)
    nn.init.constant_(net.get_submodule(sites[-1]).bias, torch.nan)
    with pytest.raises(UserError, match=rf"gradients at '{sites[0]}' are inf or NaN"):
        estimate_fisher(net, [batch], "classification", sites)


def test_under_no_grad_autocast_and_another_default_dtype():
    """As where FWSVD calls it."""
    net, sites = make()
    net, batch = net.float(), batch_of(net)
    expected = estimate_fisher(net, [batch], "classification", sites)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = estimate_fisher(net, [batch], "classification", sites)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, entry in expected.items():
        assert torch.equal(found[name], entry)


@pytest.mark.parametrize(("task", "expected"), [("wikitext2", [4, 1]), ("sst2", [4, 1]), ("xsum", [3, 2])])
def test_parts_have_the_tokens_that_a_forward_has(task, expected):
    """A mask that stands for both stacks counts once, two of an encoder-decoder both."""
    mask = torch.ones(5, 128, dtype=torch.int64)
    rows = {"input_ids": mask, "attention_mask": mask, "labels": mask[:, :32], "index": torch.arange(5)}
    parts = list(row_parts(task_type(get_task(task)), rows, 512))
    assert [len(part["index"]) for part in parts] == expected


def test_fisher_information_of_a_part_of_the_batch_at_a_time(monkeypatch):
    """The graph of a whole batch of a language model takes gigabytes; the sum over examples is the same."""
    net, rows = make_net("llama", "plain_text", dropout=0.0), []
    batch, sites = examples(net, "language_modelling", 5, 12), [site.name for site in find_sites(net)]
    whole = estimate_fisher(net, [batch], "language_modelling", sites)
    net.register_forward_pre_hook(lambda *args: rows.append(len(args[-1]["input_ids"])), with_kwargs=True)
    monkeypatch.setattr(statistics, "TOKENS", 24)
    found = estimate_fisher(net, [batch], "language_modelling", sites)
    assert rows == [2, 2, 1]
    for name in sites:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_gradients_are_means_over_examples(family):
    """Of ALBERT the gradients of one matrix are summed over its uses."""
    net = make_net(family, initializer_range=0.2).double().train()
    names = [site.name for site in find_sites(net)][::3]
    batch = make_batch(5, 9)
    full = {name: torch.cat([column, column[:1]]) for name, column in batch.items()}
    full["index"][-1] = -1
    found = mean_gradients(net, [full], "classification", names)
    assert net.training and all(p.grad is None and p.requires_grad for p in net.parameters())
    net.eval()
    for name in names:
        weight, total = net.get_parameter(f"{name}.weight"), 0
        for i in range(5):
            real = batch["attention_mask"][i].bool()  # without padding
            output = net(input_ids=batch["input_ids"][i : i + 1, real]).logits
            loss = torch.nn.functional.cross_entropy(output, batch["labels"][i : i + 1])
            (gradient,) = torch.autograd.grad(loss, weight)
            total = total + gradient
        assert torch.allclose(found[name], total / 5, atol=1e-10)


def test_what_cannot_be_used():
    net, name = make_net("bert"), "bert.encoder.layer.0.output.dense"
    with pytest.raises(UserError, match=r"^calibration: there are no examples"):
        mean_gradients(net, [], "classification", [name])
    with torch.no_grad():
        net.classifier.weight.fill_(float("inf"))
    with pytest.raises(UserError, match=f"^calibration: gradients at '{name}' are inf or NaN"):
        mean_gradients(net, [make_batch()], "classification", [name])
