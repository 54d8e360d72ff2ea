"""What a stage hears of the teacher: logits, hidden states, nothing; with one forward and with two."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import step
from tiny import make_batch, make_net

from lit_compress.evaluation.evaluate import constant_answer
from lit_compress.methods import LPAF, SVD, Magnitude
from lit_compress.methods.base import Distillation
from lit_compress.methods.cofi.cofi import CoFiDistillation
from lit_compress.methods.lpaf import MixedRank
from lit_compress.methods.sp3 import SP3Distillation
from lit_compress.models.storage import load_net, save_net
from lit_compress.numerics.losses import distillation_loss, layer_distillation_loss, task_loss
from lit_compress.run import runner as stages
from lit_compress.run.folder import Run
from lit_compress.utils.errors import UserError


def put(folder, net):
    folder.mkdir()
    save_net(net, folder)
    return folder


def make(folder, teacher, family="bert", **distillation):
    net = put(folder / "net", make_net(family, dropout=0.0))
    teacher = put(folder / "teacher", teacher)
    method = Magnitude(backbone="unused", distillation=Distillation(**distillation))
    method.prepare(method.stages()[1], 0, net, lambda: load_net(teacher))
    method.configure_model()
    return method


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "bart", "t5", "llama"])
@pytest.mark.parametrize(
    ("settings", "layer_loss"),
    [
        ({}, layer_distillation_loss),
        ({"mask_padding": True}, layer_distillation_loss),
        ({"mask_padding": True, "relative": True}, partial(layer_distillation_loss, relative=True)),
    ],
    ids=["", "mask_padding", "relative"],
)
def test_terms_are_the_formula(family, settings, layer_loss, tmp_path):
    """(1 - alpha) task + alpha logits + alpha_layers sum of MSE over embeddings and every layer, padding in or out."""
    method, batch = (
        make(tmp_path, make_net(family, seed=1), family, alpha=0.3, alpha_layers=15.0, **settings),
        make_batch(),
    )
    loss, terms = step(method, batch)
    inputs = method.kind.inputs(method.net, batch)
    student, teacher = (n(**inputs, output_hidden_states=True) for n in (method.net, method._teacher[0]))
    names = ["encoder_hidden_states", "decoder_hidden_states"] if family in ("bart", "t5") else ["hidden_states"]
    assert all(len(student[name]) == 1 + method.net.config.num_hidden_layers for name in names)
    mask = batch["attention_mask"] if settings else None
    expected = {
        "task": 0.7 * task_loss(student.logits, batch["labels"], "classification"),
        "distillation": 0.3 * distillation_loss(student.logits, teacher.logits, "classification"),
        "layers": 15 * sum(layer_loss(student[name], teacher[name], mask) for name in names),
    }
    assert terms.keys() == expected.keys()
    assert all(torch.allclose(terms[name], expected[name], rtol=1e-5) for name in terms)
    assert torch.allclose(loss, sum(expected.values()), rtol=1e-5)
    loss.backward()
    assert all(p.grad is None for p in method._teacher[0].parameters())
    assert not any("teacher" in name for name in (*method.state_dict(), *dict(method.named_parameters())))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"alpha": 0.0}, {"task"}),
        ({"alpha": 0.5}, {"task", "distillation"}),
        ({"alpha": 0.0, "alpha_layers": 1.0}, {"task", "layers"}),
        ({"alpha": 1.0, "alpha_layers": 1.0}, {"task", "distillation", "layers"}),
    ],
)
def test_only_what_is_asked_for_is_computed(settings, names, tmp_path, monkeypatch):
    """Without a weight: no teacher, no hidden states; with both at 0 the loss is that of plain fine-tuning."""
    method, batch, asked = make(tmp_path, make_net(seed=1), **settings), make_batch(), []
    forward = type(method.net).forward

    def note(self, *args, output_hidden_states=None, **kwargs):
        asked.append(bool(output_hidden_states))
        return forward(self, *args, output_hidden_states=output_hidden_states, **kwargs)

    monkeypatch.setattr(type(method.net), "forward", note)
    loss, terms = step(method, batch)
    assert terms.keys() == names and len(method._teacher) == (names != {"task"})
    if settings["alpha"] == 1:  # labels have no weight
        assert step(method, batch | {"labels": batch["labels"] + 99})[0] == loss
        asked = asked[:2]
    assert asked == ["layers" in names] * (1 + len(method._teacher))
    method.logits(batch)
    assert asked[-1] is False  # validation
    if names == {"task"}:
        assert loss == task_loss(method.logits(batch), batch["labels"], "classification")


@pytest.mark.parametrize("mode", ["sequential", "concat"])
def test_two_forwards(mode, tmp_path, monkeypatch):
    """LPAF's two forwards: the mean of the two layer losses."""
    net, teacher = put(tmp_path / "net", make_net(dropout=0.0)), put(tmp_path / "teacher", make_net(seed=1))
    batch = make_batch()
    monkeypatch.setattr(LPAF, "trainer", type("At", (), {"global_step": 10}), raising=False)

    def build(mode):
        method = LPAF(
            backbone="unused",
            density=0.5,
            retrain=MixedRank(weighting="none", p_init=0.5),
            distillation=Distillation(alpha=0.2, alpha_layers=4.0),
        )
        stage = method.stages()[-1]
        stage._concats = lambda _: mode == "concat"
        method.prepare(stage, 0, net, lambda: load_net(teacher))
        method.configure_model()
        stage.set_total_steps(100)
        method.step_seed = 5
        return method

    method = build(mode)
    _, terms = step(method, batch)
    assert method._hidden is None
    coins = method.stage._throw(method.stage.p(10), 5, 2)
    assert not torch.equal(coins[0], coins[1])
    other = build("sequential")
    inputs = other.kind.inputs(other.net, batch)
    target = other._teacher[0](**inputs, output_hidden_states=True).hidden_states
    expected = 0.0
    for row in coins:
        other.stage._set(row[None])
        hidden = other.net(**inputs, output_hidden_states=True).hidden_states
        expected = expected + 4.0 * layer_distillation_loss(hidden, target) / 2
    assert torch.allclose(terms["layers"], expected, rtol=1e-5)


class Data:
    """Stands for a DataModule: dev labels."""

    def __init__(self, task, *labels):
        from lit_compress.tasks.records import get_task

        self.record, self._labels = get_task(task), torch.tensor(labels)

    def val_dataloader(self):
        return [[{"labels": part} for part in self._labels.split(3)], []]


@pytest.mark.parametrize(
    ("data", "expected", "error"),
    [
        (Data("mnli", 0, 2, 2, 1, 2, 0, 1, 0, 2, 2), 0.5, 0.134),
        (Data("sst2", *[1, 1, 1, 0] * 100), 0.75, (0.75 * 0.25 / 400) ** 0.5),
        (Data("cola", *[1, 1, 1, 0] * 100), 0.0, 400**-0.5),
        (Data("stsb", *[1.0, 0.5, 3.0, 5.0] * 100), 0.0, 400**-0.5),
    ],
)
def test_the_best_constant_answer(data, expected, error):
    answer = constant_answer(data)
    assert answer == {"constant": pytest.approx(expected), "constant_error": pytest.approx(error, rel=0.01)}


def test_the_best_constant_answer_may_have_the_same_score_in_every_sample():
    """Every row has one of two labels: both labels for all rows are 2/3 right, whatever the rows."""
    data = Data("go_emotions", *[[1, 0], [0, 1]] * 20)
    data.record = replace(data.record, labels=("joy", "anger"))
    assert constant_answer(data) == {"constant": pytest.approx(2 / 3), "constant_error": 0.0}


@pytest.mark.parametrize(
    ("teacher", "metric", "alpha", "finding"),
    [
        ("given", 0.07, 0.5, UserError),
        ("given", 0.74, 0.5, UserError),
        ("given", 0.75, 0.5, UserWarning),
        ("given", 0.07, 0.0, UserWarning),
        (None, 0.75, 0.5, UserWarning),
        ("given", 0.78, 0.5, UserWarning),  # within two standard errors
        (None, 0.78, 0.5, UserWarning),
        ("given", 0.81, 0.5, None),
        (None, 0.81, 0.0, None),
    ],
)
def test_teacher_that_knows_nothing(teacher, metric, alpha, finding, tmp_path, recwarn):
    """Permuted labels of a given teacher stop the run; without its logits they are harmless."""
    method = SVD(teacher=teacher, backbone="unused", distillation=Distillation(alpha=alpha, alpha_layers=1.0))
    run = Run(tmp_path)
    run.finish({"name": "dense", "metric": {"val/accuracy": metric}})
    assert json.loads((tmp_path / "stages.json").read_text())
    parts = stages.Job(method, Data("sst2", *[1, 1, 1, 0] * 100), {}, 0)
    if finding is UserError:
        with pytest.raises(UserError, match=rf"model.teacher: 'given' has dev accuracy {metric:.4f}.* has 0.7500"):
            stages._check_teacher(parts, run)
        return
    stages._check_teacher(parts, run)
    messages = [str(w.message) for w in recwarn if "0.7500" in str(w.message)]
    assert len(messages) == (finding is UserWarning)
    assert all("model.dense" in m for m in messages) or teacher


def test_bad_settings_are_one_line():
    with pytest.raises(UserError, match=r"distillation.alpha_layers: -1.0 is below 0"):
        Distillation(alpha_layers=-1.0)
    for own in (CoFiDistillation, SP3Distillation):
        with pytest.raises(
            UserError, match=r"distillation.relative: True is not for layers that a learned map compares"
        ):
            own(relative=True)
        with pytest.raises(UserError, match=r"nothing is learned; usual: 0.[13], 0.[97], 0"):
            own(alpha=0.0, alpha_layers=0.0)
        assert (own().label_weight, own(alpha_labels=0.5).label_weight) == (0.0, 0.5)
