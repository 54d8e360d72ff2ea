"""``factorize --distil`` is a stage of ``fit``: its steps are those of a loop that is written out; options count."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf, nan

import pytest
import torch
from tiny import make_net, write_model, write_texts

from lit_compress.data import settings
from lit_compress.data.datamodule import DataModule
from lit_compress.methods import SVD
from lit_compress.models.storage import load_net, save_net
from lit_compress.numerics.losses import distillation_loss, layer_distillation_loss
from lit_compress.run.callbacks import Checkpoints
from lit_compress.run.distilling import LOSSES, Distilling, Recovery
from lit_compress.run.folder import Run
from lit_compress.run.job import Job
from lit_compress.stages.base import Training, build_optimizer, build_schedule
from lit_compress.utils.errors import UserError

TRAINER = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "gradient_clip_val": 1.0,
    "enable_model_summary": False, "precision": None,
}  # fmt: skip
STEPS = 9  # of 7 in an epoch


class Study:
    """A dense model with dropout, a damaged one in a folder, and stages that train it, each to its last step."""

    def __init__(self, backbone, data, folder):
        self.backbone, self.data, self.folder = str(backbone), str(data), folder
        self.dense, net = (make_net("bert", "sst2", dropout=0.5, initializer_range=0.2).eval() for _ in range(2))
        net.load_state_dict(self.dense.state_dict())
        torch.manual_seed(1)
        with torch.no_grad():
            for value in net.parameters():
                value.mul_(1 + 0.3 * torch.randn_like(value) * (value.ndim > 1))
        save_net(net, folder / "net")

    def stage(self, name, recovery=None, losses=None, size=16, retrain=None, **trainer):
        data = DataModule("sst2", self.backbone, self.data, batch_size=size)
        retrain = Training(**retrain or {})
        made = SVD(backbone=self.backbone, distillation=replace(LOSSES, **losses or {}), retrain=retrain)
        job, recovery = Job(made, data, TRAINER | trainer, 42, every=1), recovery or Recovery(distil=STEPS)
        return Distilling(job, recovery, Run(self.folder / name))

    @cached_property
    def usual(self):
        return self.trained("usual")

    def trained(self, name, **options):
        distilling = self.stage(name, **options)
        distilling.run.dense = self.dense
        distilling.fit(self.folder / "net")
        return load_net(distilling.run.net("distil")).state_dict()


@pytest.fixture(scope="module")
def study(tiny_backbone, tiny_data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "on_sanity_check_end", lambda *_: None)
        patch.setattr(Checkpoints, "best", property(lambda _: -inf, lambda *_: None), raising=False)
        yield Study(tiny_backbone, tiny_data, tmp_path_factory.mktemp("distilling"))


def same(one, other, atol):
    """Whether two models are; the gradients of keys' biases are rounding, of which AdamW makes whole steps."""
    return all(torch.allclose(one[name], other[name], atol=atol) for name in one if not name.endswith("key.bias"))


def test_the_steps_are_those_of_a_loop(study):
    """Logits and hidden states of all tokens, no labels, no dropout; order, clipping and schedule are those of fit."""
    distilling, found = study.stage("usual"), study.usual
    net, stage = load_net(study.folder / "net").eval(), distilling.made()
    stage.set_total_steps(STEPS)
    optimizer = build_optimizer(stage, net, "32-true")
    schedule = build_schedule(stage, optimizer)["scheduler"]
    loader = distilling.job.data.train_dataloader()
    for batch in [batch for _ in range(2) for batch in loader][:STEPS]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        own = net(**inputs, output_hidden_states=True)
        with torch.no_grad():
            target = study.dense(**inputs, output_hidden_states=True)
        loss = distillation_loss(own.logits, target.logits, "classification")
        mask = inputs["attention_mask"]
        loss += 10 * layer_distillation_loss(own.hidden_states, target.hidden_states, mask, relative=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert same(net.state_dict(), found, 1e-5)
    told = distilling.told()
    assert (told["steps"], told["batch"], told["best_step"]) == (9, 16, 9)
    assert [scores.keys() for scores in told["metric"]] == [{"val/accuracy"}] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"losses": {"alpha": 0.5, "temperature": 1.0}},
        {"recovery": Recovery(distil=STEPS, rate=1e-4)},
        {"retrain": {"optimizer": torch.optim.SGD}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_trainer_and_of_the_losses_count(options, study):
    other = study.trained(next(iter(options)), **options)
    assert any(not torch.equal(value, other[name]) for name, value in study.usual.items())


def test_accumulation_makes_the_same_steps(study):
    parts = study.trained("parts", size=4, accumulate_grad_batches=4)
    assert same(study.usual, parts, 1e-4)


def test_a_stopped_stage_continues_bit_for_bit(study, monkeypatch):
    save = Checkpoints.on_train_batch_end

    def stop(self, trainer, *args):
        save(self, trainer, *args)
        if trainer.global_step == 5:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Checkpoints, "on_train_batch_end", stop)
        study.trained("stopped")
    found = study.trained("stopped")
    assert all(torch.equal(value, found[name]) for name, value in study.usual.items())


def test_fewer_blocks_learn_states_that_are_spread_evenly(study):
    stage = study.stage("layers").made()
    states = [torch.full((1, 2, 3), float(i)) for i in range(5)]
    assert float(stage.layer_loss(states[::2], states, None, False)) == 0


def test_long_texts_of_a_language_model_are_divided(tmp_path, monkeypatch):
    """A step keeps its texts; a micro-batch has no more logits than one of ``fit``."""
    backbone = write_model(tmp_path / "net", "llama", "plain_text", max_position_embeddings=256)
    (tmp_path / "texts").mkdir()
    write_texts(tmp_path / "texts")

    data = DataModule("plain_text", str(backbone), str(tmp_path / "texts"), batch_size=12, max_length=100)
    job = Job(SVD(task="plain_text", backbone=str(backbone)), data, dict(TRAINER), 42)
    monkeypatch.setattr(settings, "LOGITS_CPU", 3 * 100 * len(data.tokenizer))
    texts = Distilling(job, Recovery(distil=1), Run(tmp_path / "run")).job.data
    assert texts.split == data.split == [12, 1, 1] and texts.train_dataloader().largest == (3, 100)


def test_nothing_to_learn_from_the_dense_model_is_refused(study):
    with pytest.raises(
        UserError, match=r"nothing of the dense model is learned; nearest: --model\.distillation\.alpha"
    ):
        study.stage("nothing", losses={"alpha": 0.0, "alpha_layers": 0.0})


def test_texts_without_labels_are_not_for_a_loss_of_labels(study, tmp_path):
    (tmp_path / "texts.txt").write_text("a film\n" * 9)
    recovery = Recovery(distil=1, texts=str(tmp_path / "texts.txt"))
    with pytest.raises(UserError, match=r"has no labels; nearest: --model.distillation.alpha 1"):
        study.stage("unlabelled", recovery, losses={"alpha": 0.5})
    assert study.stage("unlabelled", recovery).job.data.train_size() == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refine": 0}, "--refine: 0 is below 1, the smallest valid value; usual: 100"),
        ({"distil": -3}, "--distil: -3 is below 1"),
        ({"texts": "a.txt"}, "--distil_texts: 'a.txt' is read by --distil only; add --distil 100"),
        ({"rate": 1e-4}, "--distil_rate: '0.0001' is read by --distil only; add --distil 100"),
        ({"distil": 5, "rate": 0.0}, "--distil_rate: 0 is not between 0 and 1; usual: 0.0003"),
        ({"distil": 5, "rate": nan}, "--distil_rate: nan is not between 0 and 1"),
        ({"distil": 5, "texts": "nowhere.txt"}, "--distil_texts: 'nowhere.txt' is no file"),
    ],
)
def test_a_recovery_that_cannot_work_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        Recovery(**settings)
