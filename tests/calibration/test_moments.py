"""Kronecker factors against a loop over single examples without padding, for every family and task; their sums."""

from __future__ import annotations

import pytest
import torch
from in_memory import batch_of, collect_kronecker, cut, estimate_fisher
from moments import decompose, draw, estimated_loss
from tiny import ALL, SOFTMAX_IN_FLOAT32, make_net
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_compress.calibration import moments
from lit_compress.calibration.moments import Gram
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.numerics.kronecker import change_of_bias, kronecker_svd
from lit_compress.numerics.sampled_labels import draw_labels
from lit_compress.tasks import KINDS
from lit_compress.utils.errors import UserError

TASKS = {
    "classification": "sst2", "regression": "stsb", "tagging": "conll2003", "span_qa": "squad", "summarization": "xsum",
    "language_modelling": "plain_text",
}  # fmt: skip
PAIRS = [
    ("classification", "drawn", "bert"), ("classification", "exact", "bert"), ("regression", "drawn", "bert"),
    ("tagging", "drawn", "distilbert"), ("span_qa", "drawn", "bert"), ("span_qa", "drawn", "deberta-v2"),
    ("summarization", "drawn", "bart"), ("summarization", "drawn", "t5"), ("language_modelling", "drawn", "opt"),
    ("language_modelling", "drawn", "llama"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Matrices of several blocks, the last one smaller."""
    monkeypatch.setattr(moments, "BLOCK", 24)


def make(variant="bert", kind="classification", task=None, **settings):
    """A float64 net whose gradients are well above rounding, its biases and norms not at 0 and 1."""
    family, more = ALL[variant]
    net = make_net(family, task or TASKS[kind], dropout=0.0, **more, **settings).double().eval()
    generator = torch.Generator().manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.15, generator=generator)
    return net


def losses_of(task, logits, row, labels, seed):
    """(weight, loss) of every label of one example, by the definition."""
    if task.loss == "regression":
        return [(1.0, logits.sum())]
    if labels == "exact":
        return [(p.item(), F.cross_entropy(logits, torch.tensor([c]))) for c, p in enumerate(logits.softmax(-1)[0])]
    chosen, counted = draw_labels(logits, row["index"], seed), row["labels"] != -100
    return [(1.0, -logits.log_softmax(-1)[counted].gather(-1, chosen[counted][:, None]).sum())]


def loop(net, batch, kind, labels="drawn", seed=0, by_text=False):
    """{site: (A, m, G, tokens)} by plain autograd, one example after the other, cut to its length.

    By text, a text's x x^T and x are means over its tokens.
    """
    task, names = KINDS[kind], [site.name for site in find_sites(net)]
    inputs, squares = {name: [] for name in names}, dict.fromkeys(names, 0.0)
    for row in cut(batch, *[1] * len(batch["index"])):
        uses, handles = [], []
        for name in names:
            hook = lambda _, args, y, name=name, uses=uses: uses.append((name, args[0], y))  # noqa: E731
            handles.append(net.get_submodule(name).register_forward_hook(hook))
        logits = task.logits(net(**task.inputs(net, row)), row)
        for handle in handles:
            handle.remove()
        for name, x, _ in uses:
            inputs[name].append(x.detach().reshape(-1, x.shape[-1]))
        for weight, loss in losses_of(task, logits, row, labels, seed):
            gradients = torch.autograd.grad(loss, [y for *_, y in uses], retain_graph=True, allow_unused=True)
            for (name, _, y), d in zip(uses, gradients, strict=True):
                d = torch.zeros_like(y) if d is None else d
                squares[name] = squares[name] + weight * torch.einsum("...i,...j->ij", d, d)
    found = {}
    for name in names:
        texts = inputs[name] if by_text else [torch.cat(inputs[name])]
        a, m = (
            sum(moments) / len(texts) for moments in zip(*((x.T @ x / len(x), x.mean(0)) for x in texts), strict=True)
        )
        found[name] = a, m, squares[name] / len(batch["index"]), len(texts) if by_text else len(texts[0])
    return found


def check(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, (a, m, g, tokens) in expected.items():
        entry = found[name]
        assert g.abs().max() > 0, name
        for value, wanted in ((entry.inputs(), a), (entry.mean, m), (entry.gradients(), g)):
            assert value.dtype == torch.float64 and value.device.type == "cpu"
            torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
        assert entry.tokens == tokens


@pytest.mark.parametrize("variant", ALL)
def test_equals_the_loop(variant):
    """Every family, padded examples, any batches, any order."""
    net = make(variant)
    batch = batch_of(net)
    expected, tolerance = loop(net, batch, "classification"), 1e-5 if variant in SOFTMAX_IN_FLOAT32 else 1e-9
    for sizes in ((4,), (2, 2), (1, 1, 1, 1)):
        check(collect_kronecker(net, cut(batch, *sizes), "classification"), expected, tolerance)
    turned = {name: column.flip(0) for name, column in batch.items()}
    check(collect_kronecker(net, cut(turned, 3, 1), "classification"), expected, tolerance)


@pytest.mark.parametrize("variant", ["bert", "mpnet", "deberta-v2", "bart", "opt"])
def test_every_text_counts_once(variant):
    """A text of three tokens as much as one of nine, in any batches."""
    net = make(variant)
    batch = batch_of(net)
    expected = loop(net, batch, "classification", by_text=True)
    for sizes in ((4,), (1, 3)):
        check(collect_kronecker(net, cut(batch, *sizes), "classification", by_text=True), expected)


@pytest.mark.parametrize(("kind", "labels", "variant"), PAIRS)
def test_types_of_tasks(kind, labels, variant):
    net = make(variant, kind)
    batch = batch_of(net, kind)
    expected = loop(net, batch, kind, labels, seed=3)
    for sizes in ((4,), (1, 3)):
        check(collect_kronecker(net, cut(batch, *sizes), kind, labels=labels, seed=3), expected)


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "span_qa"])
def test_drawn_labels_need_none(kind):
    net = make(kind=kind)
    batch = batch_of(net, kind)
    bare = {name: column for name, column in batch.items() if name != "labels"}
    with_labels, without = (collect_kronecker(net, [part], kind) for part in (batch, bare))
    for name, entry in with_labels.items():
        assert torch.equal(entry.gradients(), without[name].gradients())
    with pytest.raises(UserError, match=r"labels: the data has none, only .*; --method SecondOrder needs none"):
        estimate_fisher(net, [bare], kind, None)


@pytest.mark.parametrize("variant", ["bert", "bart", "opt", "deberta-v2"])
def test_inputs_only(variant):
    """Without labels there is no backward, and nothing else differs."""
    net = make(variant)
    batch = batch_of(net)
    expected = loop(net, batch, "classification")
    with FlopCounterMode(display=False) as counter:
        found = collect_kronecker(net, [batch], "classification", labels=None)
    with FlopCounterMode(display=False) as both:
        collect_kronecker(net, [batch], "classification")
    assert counter.get_total_flops() < 0.7 * both.get_total_flops()
    for name, (a, m, _, tokens) in expected.items():
        torch.testing.assert_close(found[name].inputs(), a)
        torch.testing.assert_close(found[name].mean, m)
        assert found[name].tokens == tokens
        with pytest.raises(AssertionError):
            found[name].gradients()


def test_shared_inputs_are_summed_once():
    net = make()
    names = [site.name for site in find_sites(net)][:4]
    with FlopCounterMode(display=False) as together:
        found = collect_kronecker(net, [batch_of(net)], "classification", names[:3], labels=None)
    with FlopCounterMode(display=False) as alone:
        collect_kronecker(net, [batch_of(net)], "classification", names[:1], labels=None)
    assert together.get_total_flops() == alone.get_total_flops()
    assert found[names[0]]._inputs is found[names[2]]._inputs


def test_single_examples_only_where_needed():
    """DeBERTa's query and key also see the relative positions, which no example owns."""
    for variant, forwards in (("bert", 1), ("albert", 1), ("opt", 1), ("deberta-v2", 4)):
        net, calls = make(variant), []
        net.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        collect_kronecker(net, [batch_of(net)], "classification")
        assert len(calls) == forwards


def test_positions_as_many_as_tokens():
    """Positions of DeBERTa are never taken for tokens, however many examples and tokens there are."""
    net = make("deberta-v2")  # 12 positions
    for sizes in ((1, 12), (2, 6), (3, 4), (2, 12)):
        batch = batch_of(net, size=sizes[0], length=sizes[1])
        check(collect_kronecker(net, [batch], "classification"), loop(net, batch, "classification"))


def test_float32_and_dropout():
    net = make()
    batch = batch_of(net)
    expected = loop(net, batch, "classification")
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    found = collect_kronecker(net.float().train(), [batch], "classification")
    check(found, expected, 1e-3)
    assert found[find_sites(net)[0].name]._inputs.flat.dtype == torch.float32


def test_a_factorized_net():
    """What has replaced a Linear is a site as well."""
    net = make()
    name = find_sites(net)[2].name
    factorize(net, {name: 4}, lambda name, weight, rank: decompose(weight, rank))
    check(collect_kronecker(net, [batch_of(net)], "classification"), loop(net, batch_of(net), "classification"))


@pytest.mark.parametrize("place", [1, 3, 4, 5, 9])
def test_estimated_loss_is_the_divergence(place):
    """Half of (M), with G the sum over an example's tokens, is near the measured KL divergence of an example."""
    net = make()
    batch = batch_of(net, size=60)
    site = find_sites(net)[place].name
    factors = collect_kronecker(net, [batch], "classification", [site], labels="exact")[site]
    layer, inputs = net.get_submodule(site), KINDS["classification"].inputs(net, batch)
    sums = factors.inputs(), factors.gradients(), factors.mean
    found = kronecker_svd(layer.weight, factors.inputs(), [factors.gradients()], mean=factors.mean)
    with torch.no_grad():
        dense = net(**inputs).logits.log_softmax(-1)
        left, right = found.factors(24)
        estimate = estimated_loss(layer.weight, left @ right, *sums) / 2
        layer.bias += change_of_bias(layer.weight, left @ right, factors.mean)
        layer.weight.copy_(left @ right)
        measured = F.kl_div(net(**inputs).logits.log_softmax(-1), dense, log_target=True, reduction="batchmean")
    assert 0.6 < estimate / float(measured) < 1.5
    assert estimate <= float(found.sigma[24:].square().sum()) / 2  # the damped moments are larger


def _rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for variant in ("bert", "deberta-v2"):
        net = make(variant)
        batches = cut(batch_of(net), 2, 1, 1)
        mine = batches[:2] if rank == 0 else batches[2:]  # uneven in batches and in examples
        reduce = torch.distributed.all_reduce
        for once in (True, False):
            expected = loop(net, batch_of(net), "classification", by_text=once)
            check(collect_kronecker(net, mine, "classification", reduce=reduce, by_text=once), expected)
        names = list(expected)[:3]
        shared, alone = (
            estimate_fisher(net, part, "classification", names, reduce=how)
            for part, how in ((mine, reduce), (batches, None))
        )
        for name in names:
            torch.testing.assert_close(shared[name], alone[name])
        mine = batches if rank == 0 else []
        check(collect_kronecker(net, mine, "classification", reduce=reduce), expected)
    with pytest.raises(UserError, match="no examples"):
        collect_kronecker(net, [], "classification", reduce=reduce)
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    torch.multiprocessing.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")


def test_errors(capsys):
    net = make()
    batch, names = batch_of(net), [site.name for site in find_sites(net)]
    with pytest.raises(UserError, match=r"calibration: there are no examples; give at least 1"):
        collect_kronecker(net, [], "classification")
    with pytest.raises(UserError, match=r"no examples"):
        collect_kronecker(net, [batch | {"index": torch.full((4,), -1)}], "classification")
    nn.init.constant_(net.get_submodule(names[-1]).bias, torch.nan)
    with pytest.raises(UserError, match=rf"gradients at '{names[0]}' are inf or NaN"):
        collect_kronecker(net, [batch], "classification")
    net = make()
    nn.init.constant_(net.get_submodule(names[0]).bias, torch.inf)
    with pytest.raises(UserError, match=r"inputs at .* are inf or NaN"):
        collect_kronecker(net, [batch], "classification", labels=None)
    net = make()
    net.bert.encoder.layer[1].output.dense.weight.data.zero_()
    with pytest.raises(UserError, match=r"no gradient reaches 'bert.encoder.layer.1.intermediate.dense'; leave it out"):
        collect_kronecker(net, [batch], "classification")


def test_few_tokens_are_said(capsys):
    net = make()
    name = find_sites(net)[5].name
    collect_kronecker(net, [batch_of(net, size=2, length=7)], "classification", [name])
    assert "tokens are fewer than the 64 inputs of" in capsys.readouterr().err
    collect_kronecker(net, [batch_of(net, size=30, length=9, seed=5)], "classification", [name])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [5, 24, 25, 60])
def test_gram(size):
    gram, rows = Gram(size, torch.float64), draw(20, size)
    gram.add(rows[:7])
    gram.add(rows[7:])
    torch.testing.assert_close(gram.whole(0.5), rows.T @ rows / 2)
    assert torch.equal(gram.whole(), gram.whole().T)
    if size == 60:
        assert gram.flat.numel() == 24 * 24 + 24 * 48 + 12 * 60
