"""Distillation without labels: its loss is that of fit without the labels' term, and it brings a model nearer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import make_batch, make_net

from lit_compress.cli import one_shot
from lit_compress.cli.factorizing import run_factorize
from lit_compress.cli.lines import read_line
from lit_compress.numerics.losses import distillation_loss, layer_distillation_loss
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.distil import LOSSES, Recovery, distil, part_losses
from lit_compress.tasks import KINDS
from lit_compress.utils import memory
from lit_compress.utils.errors import UserError

CPU, LAYERS = torch.device("cpu"), Stage("distil", Training()).layer_loss


def damaged(net):
    torch.manual_seed(1)
    small = copy.deepcopy(net)
    with torch.no_grad():
        for value in small.parameters():
            value.mul_(1 + 0.3 * torch.randn_like(value) * (value.ndim > 1))
    return small


def unlabelled(size=6, seed=1):
    batch = make_batch(size, 9, seed=seed)
    del batch["labels"]
    return batch


def test_the_loss_is_that_of_logits_and_hidden_states():
    net = make_net("bert", "mnli", initializer_range=0.2).eval()
    small, rows, kind = damaged(net), unlabelled(), KINDS["classification"]
    terms = part_losses(kind, net, small, rows, LOSSES, LAYERS)
    inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
    one, other = (model(**inputs, output_hidden_states=True) for model in (small, net))
    states = layer_distillation_loss(one.hidden_states, other.hidden_states, rows["attention_mask"], relative=True)
    assert float(terms["task"]) == 0
    assert terms["distillation"].item() == pytest.approx(
        distillation_loss(one.logits, other.logits, "classification").item()
    )
    assert terms["layers"].item() == pytest.approx(10 * states.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("family", "task", "name"),
    [("bert", "sst2", "classification"), ("bert", "stsb", "regression"), ("llama", "plain_text", "language_modelling")],
)
def test_a_damaged_model_comes_nearer_to_the_dense_one(family, task, name):
    net, kind = make_net(family, task, initializer_range=0.2).eval(), KINDS[name]
    small, batches = damaged(net), [unlabelled(seed=seed) for seed in range(3)]
    if name == "language_modelling":  # the labels are the texts
        batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    before = copy.deepcopy(net.state_dict())

    def distance():
        with torch.no_grad():
            return sum(float(sum(part_losses(kind, net, small, rows, LOSSES, LAYERS).values())) for rows in batches)

    start = distance()
    told = distil(net, small, kind, batches, Recovery(distil=40), CPU, LAYERS)
    assert distance() < 0.8 * start and told["loss"][1] < told["loss"][0]
    assert (told["steps"], told["texts"]) == (40, 240)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_parts_of_a_batch_count_by_their_texts(monkeypatch):
    """The loss of a language model's batch is the mean over its texts of those of its parts, as it is before a step."""
    net, kind = make_net("llama", "plain_text", initializer_range=0.2).eval(), KINDS["language_modelling"]
    small, batch = damaged(net), unlabelled(5)
    batch["labels"] = batch["input_ids"]
    monkeypatch.setattr("lit_compress.stages.distil.TOKENS", 18)
    parts = [{name: column[i : i + 2] for name, column in batch.items()} for i in (0, 2, 4)]
    with torch.no_grad():
        losses = [float(sum(part_losses(kind, net, small, rows, LOSSES, LAYERS).values())) for rows in parts]
    expected = (2 * losses[0] + 2 * losses[1] + losses[2]) / 5
    assert distil(net, small, kind, [batch], Recovery(distil=1), CPU, LAYERS)["loss"][0] == pytest.approx(
        expected, rel=1e-5
    )


def test_mixed_precision_computes_both_models_in_bfloat16():
    """The loss is near that of float32; parameters stay as they were."""
    net, kind, found = make_net("bert", "sst2", initializer_range=0.2).eval(), KINDS["classification"], set()
    net.classifier.register_forward_hook(lambda module, inputs, output: found.add(output.dtype))
    told = []
    for precision in (None, "bf16-mixed"):
        small = damaged(net)
        small.classifier.register_forward_hook(lambda module, inputs, output: found.add((output.dtype,)))
        recovery = Recovery(distil=1, rate=1e-4, precision=precision)
        told.append(distil(net, small, kind, [unlabelled()], recovery, CPU, LAYERS))
        assert {value.dtype for value in small.parameters()} == {torch.float32}
    single, half = torch.float32, torch.bfloat16
    assert found == {single, half, (single,), (half,)}
    assert [each["precision"] for each in told] == ["32-true", "bf16-mixed"]
    assert [each["learning_rate"] for each in told] == [1e-4, 1e-4]
    assert told[0]["loss"][0] != told[1]["loss"][0] == pytest.approx(told[0]["loss"][0], rel=0.05)


def test_a_model_that_reads_labels_needs_them():
    net = make_net("llama", "plain_text").eval()
    with pytest.raises(UserError, match="labels: the data has none"):
        distil(net, damaged(net), KINDS["language_modelling"], [unlabelled()], Recovery(distil=1), CPU, LAYERS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refine": 0}, "--refine: 0 is below 1, the smallest valid value; usual: 100"),
        ({"distil": -3}, "--distil: -3 is below 1"),
        ({"texts": "a.txt"}, "--distil_texts: 'a.txt' is read by --distil only; add --distil 100"),
        (
            {"distil": 5, "precision": "16-mixed"},
            "trainer.precision: '16-mixed' is not known to --distil; valid: 32-tr",
        ),
        ({"rate": 1e-4}, "--distil_rate: '0.0001' is read by --distil only; add --distil 100"),
        ({"distil": 5, "rate": 0.0}, "--distil_rate: 0 is not between 0 and 1; usual: 0.0003"),
        ({"distil": 5, "rate": math.nan}, "--distil_rate: nan is not between 0 and 1"),
        ({"distil": 5, "texts": "nowhere.txt"}, "--distil_texts: 'nowhere.txt' is no file"),
    ],
)
def test_what_cannot_work_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        Recovery(**settings)


def test_a_sliced_model_learns_the_logits_alone(tiny_backbone, tiny_data, tmp_path, monkeypatch):
    """Its hidden states are narrower; while it trains, the allocator keeps freed memory for the next step."""
    limits, trained = [], []
    monkeypatch.setattr(memory, "_mallopt", lambda option, value: limits.append((option, value)))

    def watched(*args):
        trained.append(limits[-2:])
        return distil(*args)

    monkeypatch.setattr(one_shot, "distil", watched)
    monkeypatch.setattr(one_shot, "write_export", lambda out, source, choices: source.more)
    words = ["--data.task", "sst2", "--data.path", str(tiny_data), "--method", "SliceGPT", "--data.batch_size", "8"]
    line = read_line("factorize", [str(tiny_backbone), str(tmp_path / "out"), *words])
    told = run_factorize(line.own["model"], line.own["out"], line, Recovery(distil=20))
    assert told["distilled"]["loss"][1] < told["distilled"]["loss"][0]
    assert trained == [[(memory._MMAP_THRESHOLD, memory._MOST), (memory._TRIM_THRESHOLD, 2 * memory._MOST)]]
