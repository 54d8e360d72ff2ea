"""Language models without their output layer: the same losses, and no logits of a whole batch anywhere."""

import math
from types import SimpleNamespace

import pytest
import torch
from in_memory import collect_kronecker, estimate_fisher, mean_gradients
from largest import largest_tensor
from tiny import DECODERS, make_net
from torch import nn

from lit_compress.calibration import statistics
from lit_compress.calibration.second_moments import collect_grams
from lit_compress.evaluation.evaluate import divergence, evaluate
from lit_compress.methods import Magnitude
from lit_compress.models.sites import find_sites
from lit_compress.numerics import chunked_logits
from lit_compress.numerics.chunked_logits import ChunkedLogits
from lit_compress.numerics.losses import logits_losses
from lit_compress.stages.distillation import Distillation
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task

TASKS = {"decoder": "plain_text", "bart": "xsum", "t5": "xsum"}
CASES = [*((family, {}) for family in (*DECODERS, "bart", "t5")), ("t5", {"tie_word_embeddings": False}),
         ("gemma2", {"final_logit_softcapping": 0.3}), ("gemma3_text", {"final_logit_softcapping": 0.3}),
         ("llama", {"tie_word_embeddings": True}), ("opt", {"word_embed_proj_dim": 16})]  # fmt: skip


def kind_of(family):
    return task_type(get_task(TASKS.get(family, TASKS["decoder"])))


def record_of(kind):
    return get_task({"language_modelling": "plain_text", "summarization": "xsum"}[kind.name])


def names_of(net):
    return [site.name for site in find_sites(net)]


def build(family, seed=0, **settings):
    net = make_net(family, TASKS.get(family, TASKS["decoder"]), seed, dropout=0.0, **settings)
    if family == "bart":
        net.final_logits_bias.normal_()
    return net


def batch_of(family, size=3, length=12, vocabulary=100, seed=0):
    """Texts, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(5, vocabulary, (size, length), generator=generator) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[1, length // 2 :], labels[1, length // 2 :] = 0, -100
    if family in ("bart", "t5"):
        labels = labels[:, : length // 2 + 1]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "index": torch.arange(size)}


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(family, settings, monkeypatch):
    """Whatever an architecture does before and behind its output layer; both forwards, the first and later ones."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", 800)
    net, teacher = (build(family, seed, **settings).double() for seed in (0, 1))
    teacher.requires_grad_(False)
    kind, batch = kind_of(family), batch_of(family)
    plain = [n(**kind.inputs(n, batch)).logits for n in (net, teacher)]
    wanted = logits_losses(plain[0], batch["labels"], teacher=plain[1], counted=kind.counted(batch))
    expected = torch.autograd.grad(sum(wanted.values()), list(net.parameters()))
    for _ in range(2):
        ours, theirs = (kind.logits(kind.run(n, batch), batch) for n in (net, teacher))
        assert isinstance(ours, ChunkedLogits) and ours.vocabulary == 100
        found = logits_losses(ours, batch["labels"], teacher=theirs)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
        gradients = torch.autograd.grad(sum(found.values()), list(net.parameters()))
        for one, two in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_compressed_output_layer():
    """Any module that stands in its place."""

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 100), nn.Linear(32, 4)

        def forward(self, x):
            return self.left(self.right(x))

    net, kind, batch = build("llama"), kind_of("llama"), batch_of("llama")
    net.set_output_embeddings(Factors())
    logits = kind.logits(kind.run(net, batch), batch)
    assert isinstance(logits, ChunkedLogits)
    torch.testing.assert_close(logits.layer(logits.states), net(**kind.inputs(net, batch)).logits)


def test_logits_that_are_changed_in_another_way(capfd):
    """They are the model's own, of the whole batch, and a note says so."""
    net, kind, batch = build("llama"), kind_of("llama"), batch_of("llama")
    forward = net.forward

    def scaled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 3
        return output

    net.forward = scaled
    for _ in range(2):
        logits = kind.logits(kind.run(net, batch), batch)
        assert torch.equal(logits, scaled(**kind.inputs(net, batch)).logits)
    assert "'llama' changes its logits in an unknown way" in capfd.readouterr().err


def test_an_error_in_the_forward_leaves_no_hooks():
    net, kind, batch = build("llama"), kind_of("llama"), batch_of("llama")
    with pytest.raises(IndexError):
        kind.run(net, batch | {"input_ids": batch["input_ids"] + 10**6})
    assert not net.lm_head._forward_hooks and not net.lm_head._forward_pre_hooks


VOCABULARY, SIZE, LENGTH, CHUNK = 50_000, 4, 96, 1 << 19
FEW = {"num_hidden_layers": 1, "decoder_layers": 1, "encoder_layers": 1, "num_layers": 1}


@pytest.fixture(params=["llama", "bart"])
def large(request, monkeypatch):
    """A net, a second one, their kind and a batch, whose vocabulary is larger than everything else."""
    monkeypatch.setattr(chunked_logits, "ELEMENTS", CHUNK)
    family = request.param
    width = {"llama": {"hidden_size": 8, "intermediate_size": 8}, "bart": {"d_model": 8}}[family]
    heads = {"num_attention_heads": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options = {**FEW, **width, **heads, "vocab_size": VOCABULARY, "max_position_embeddings": 256}
    nets = [build(family, seed, **options) for seed in (0, 1)]
    batch = batch_of(family, SIZE, LENGTH, VOCABULARY)
    assert batch["labels"].numel() * VOCABULARY > 10 * CHUNK
    return (*nets, kind_of(family), batch)


def data_of(kind, batch):
    """What evaluation reads of a data module: the batch twice."""
    rows = SimpleNamespace(rows=[], available=8)
    loader = type("Loader", (list,), {"batch_size": SIZE, "dataset": rows})([batch, batch])
    return SimpleNamespace(
        record=record_of(kind), val_dataloader=lambda: [loader], sample_dataloader=lambda rows: loader, tokenizer=None
    )


def train(net, teacher, kind, batch):
    """In the middle of the second stage of a method, with a teacher whose layers count too."""
    method = Magnitude(task=record_of(kind).name, backbone="unused", distillation=Distillation(alpha_layers=1.0))
    method.net, method._teacher, method.stage = net, (teacher.eval().requires_grad_(False),), method.stages()[1]
    method._hidden = []
    terms = method.objective(method.logits(batch), batch, distil=True)
    sum(terms.values()).backward()
    assert set(terms) == {"task", "distillation", "layers"} and all(p.grad is not None for p in net.parameters())


def measure(net, dense, kind, batch):
    assert divergence(net, dense, data_of(kind, batch)) > 0
    if kind.name == "language_modelling":
        assert math.isfinite(evaluate(net, data_of(kind, batch))["val/perplexity"])


WORK = {
    "training": train,
    "evaluation": measure,
    "fisher": lambda net, _, kind, batch: estimate_fisher(net, [batch], kind.name, names_of(net)),
    "gradients": lambda net, _, kind, batch: mean_gradients(net, [batch], kind.name, names_of(net)),
    "kfac": lambda net, _, kind, batch: collect_kronecker(net, [batch], kind.name, labels="drawn"),
}


@pytest.mark.parametrize("work", WORK)
def test_nothing_has_the_size_of_the_logits(work, large):
    """Labels are drawn for 64 positions at a time."""
    with largest_tensor() as largest:
        WORK[work](*large)
    assert VOCABULARY < largest() <= (64 * VOCABULARY if work == "kfac" else CHUNK)


def test_fisher_information_of_a_part_of_the_batch_at_a_time(monkeypatch):
    """The graph of a whole batch takes gigabytes; the sum over examples is the same."""
    net, kind, batch = build("llama"), kind_of("llama"), batch_of("llama", 5)
    sites, rows = names_of(net), []
    whole = estimate_fisher(net, [batch], kind.name, sites)
    net.register_forward_pre_hook(lambda *args: rows.append(len(args[-1]["input_ids"])), with_kwargs=True)
    monkeypatch.setattr(statistics, "TOKENS", 24)
    found = estimate_fisher(net, [batch], kind.name, sites)
    assert rows == [2, 2, 1]
    for name in sites:
        torch.testing.assert_close(found[name].total, whole[name].total, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("what", ["inputs", "grams"])
def test_no_logits_where_nobody_reads_them(what, large, monkeypatch):
    """The output layer gives nothing once the model is known; before, one position of every text."""
    net, _, kind, batch = large
    gave = []
    kind.run(net, batch)
    net.get_output_embeddings().register_forward_hook(lambda *args: gave.append(args[-1].numel()))
    if what == "inputs":
        collect_kronecker(net, [batch], kind.name, labels=None)
    else:
        collect_grams(net, [batch], 50, run=kind.run, masks=kind.masks)
    assert gave and not any(gave)
