"""A step of the same rows has the same gradients, however it is divided into micro-batches."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import processes
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import save_file
from stage_fixtures import QUIET
from tiny import WORDS, write_backbone, write_rows

from lit_compress.data.datamodule import DataModule
from lit_compress.methods import LPAF, SP3, SVD, CoFi, Theseus
from lit_compress.methods.cofi.cofi import CoFiPruning
from lit_compress.methods.lpaf import MixedRank
from lit_compress.methods.sp3 import ProjectedPruning
from lit_compress.methods.theseus import Replacing
from lit_compress.models.backbones import load_net
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net as load_folder
from lit_compress.models.storage import save_net
from lit_compress.numerics import losses
from lit_compress.stages.base import Training
from lit_compress.stages.distillation import Distillation
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.tasks.records import get_task
from lit_compress.utils.sharding import whole

TAGS = {word: tag for word, tag in zip(WORDS, ["B-PER", "I-PER", "O", "B-LOC", "O"] * 5, strict=False)}

# kind -> task, backbone, what else its data module is told
KINDS = {
    "classification": ("sst2", None, {}),
    "regression": ("stsb", None, {}),
    "tagging": ("conll2003", None, {"max_length": 9}),
    "span_qa": ("squad", None, {"max_length": 18, "stride": 3}),
    "summarization": ("xsum", "bart", {"target_length": 6, "num_beams": 2}),
    "language_modelling": ("plain_text", "llama", {"max_length": 16}),
    "embedding": ("stsb_embedding", None, {}),
    "reranking": ("wiki_qa", None, {}),
    "multi_label": ("go_emotions", None, {}),
}

# weights far from 0: what is written hangs on what was read
FAR = {"bart": {"init_std": 0.5}, "llama": {"initializer_range": 0.2}}


def row(kind, rng):
    """Return a row of any kind of task; words are in a text once."""
    if kind in ("classification", "regression"):
        text, other = (" ".join(rng.sample(WORDS, rng.randint(1, 15))) for _ in range(2))
        label = rng.randint(0, 1) if kind == "classification" else 5 * rng.random()
        return {"sentence": text, "sentence1": text, "sentence2": other, "label": label}
    words = rng.sample(WORDS, rng.randint(4, 18))
    text = " ".join(words)
    if kind == "tagging":
        return {"tokens": words, "ner_tags": [TAGS[word] for word in words]}
    if kind == "span_qa":
        answer = " ".join(words[-3:-1])
        return {"question": words[-3], "context": text, "answers": answer}
    if kind == "embedding":
        return {"sentence1": text, "sentence2": " ".join(rng.sample(WORDS, 3)), "label": rng.random()}
    if kind == "reranking":
        return {"question": rng.choice(WORDS[:3]), "answer": text, "label": rng.randint(0, 1)}
    if kind == "multi_label":
        return {"text": text, "labels": [number for number, word in enumerate(WORDS[:20]) if word in words]}
    if kind == "summarization":
        return {"document": text, "summary": " ".join(words[::-1])}
    return {"text": text}


RETRAIN = Training(epochs=1, learning_rate=1e-20)  # every step begins with the same weights
ROWS = 17  # steps of 8 rows: the last one has a row, which is of one rank, and of one micro-batch


class KeepGradients(Callback):
    """Keep the gradients of every step, and the dev metrics."""

    def __init__(self):
        self.steps, self.scores = [], {}

    def on_validation_end(self, trainer, pl_module):
        found = trainer.callback_metrics.items()
        self.scores = {name: float(value) for name, value in found if name.startswith("val/")}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = sorted((n, p) for n, p in pl_module.named_parameters() if p.grad is not None)
        self.steps.append(torch.cat([whole(p.grad).flatten() for _, p in parameters]))


def made(kind, folder):
    """A backbone without dropout, another one as its teacher, and the folder of the rows."""
    task, family, _ = KINDS[kind]
    rng, sizes = random.Random(0), {"train": ROWS, "validation": 13}
    splits = {split: [{"id": f"{split}{i}", **row(kind, rng)} for i in range(n)] for split, n in sizes.items()}
    data = write_rows(folder / "data", **splits)
    family = family or "bert"
    settings = {**FAR.get(family, {"initializer_range": 0.2}), "max_position_embeddings": 256}
    backbone = write_backbone(folder / "backbone", family, task, **settings)
    for name, seed in (("dense", 0), ("teacher", 1)):
        net = load_net(str(backbone), get_task(task))
        net.config.update({name: 0.0 for name in net.config.to_dict() if name.endswith(("dropout", "dropout_prob"))})
        torch.manual_seed(seed)
        for parameter in net.parameters():
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        (folder / name).mkdir()
        save_net(net, folder / name)
    return str(backbone), str(data)


def fitted(folder, kind, backbone, data, batch_size, accumulate, method=None, name="retrain", **trainer):
    """Fit one epoch of retraining with a teacher, and return the gradients of its steps; else the dev metrics."""
    task, _, settings = KINDS[kind]
    method = method or SVD(
        task=task, backbone=backbone, density=0.5, retrain=RETRAIN,
        distillation=Distillation(alpha=0.5, alpha_layers=3.0, mask_padding=True, relative=True),
    )  # fmt: skip
    stage = next(stage for stage in method.stages() if stage.name == name)
    method.prepare(stage, 7, folder / "dense", lambda: load_folder(folder / "teacher"))
    module = DataModule(task, backbone, data, batch_size=batch_size, eval_batch_size=3, seed=7, **settings)
    module.accumulate = accumulate
    keep = KeepGradients()
    options = QUIET | {"max_epochs": 1, "default_root_dir": folder} | trainer
    with pytest.MonkeyPatch.context() as small:
        small.setattr(losses, "PART_CPU", 25 * 100)
        Trainer(**options, callbacks=[keep]).fit(method, module)
    return keep.scores or keep.steps


def assert_same(steps, others):
    """Check that the gradients of the steps are equal up to rounding."""
    assert len(steps) == len(others) > 1
    for grads, other in zip(steps, others, strict=True):
        assert grads.shape == other.shape
        assert (grads - other).abs().max() <= 2e-6 * grads.abs().max()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "embedding"])
def test_micro_batches_make_the_step_of_the_whole(kind, tmp_path):
    backbone, data = made(kind, tmp_path)
    steps = fitted(tmp_path, kind, backbone, data, 8, 1)
    assert_same(steps, fitted(tmp_path, kind, backbone, data, 4, 2))


@pytest.mark.parametrize("kind", ["summarization", "language_modelling"])
def test_micro_batches_are_bounded_by_their_logits(kind, tmp_path, monkeypatch):
    """By three texts: steps of 8, 8 and 1 have 3, 3 and 1 micro-batches."""
    backbone, data = made(kind, tmp_path)
    steps = fitted(tmp_path, kind, backbone, data, 8, 1)
    longest = 6 if kind == "summarization" else 16
    monkeypatch.setattr("lit_compress.data.settings.LOGITS_CPU", 3 * longest * (4 + len(WORDS)))
    for split in ((8, 1), (4, 2)):
        add = MicroBatches._add_gradients
        with patch.object(MicroBatches, "_add_gradients", autospec=True, side_effect=add) as added:
            assert_same(steps, fitted(tmp_path, kind, backbone, data, *split))
        assert added.call_count == {"summarization": 4, "language_modelling": 3}[kind]


TEACHES: dict[str, Any] = {"alpha": 0.5, "alpha_layers": 3.0}
STILL: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-20}
GATES = {**STILL, "gate_learning_rate": 1e-20, "multiplier_learning_rate": 1e-20}
METHODS = {
    "padding": ("retrain", lambda base: SVD(**base, retrain=RETRAIN, distillation=Distillation(**TEACHES))),
    "relative": ("retrain", lambda base: SVD(
        **base, retrain=RETRAIN, distillation=Distillation(**TEACHES, relative=True)
    )),
    "two forwards": ("retrain", lambda base: LPAF(**base, retrain=MixedRank(**STILL))),
    "replaced blocks": ("replace", lambda base: Theseus(**base, replace=Replacing(**STILL))),
    "matched layers": ("prune", lambda base: CoFi(**base, prune=CoFiPruning(**GATES, init="finetuned"))),
    "later layers": ("prune", lambda base: SP3(
        **base, prune=ProjectedPruning(**GATES, tokens=100, start=0.0)
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_draws_or_adds_is_of_the_step(name, tmp_path):
    """Coins, gates and matched layers are one for all micro-batches; a term of the model alone counts once."""
    backbone, data = made("tagging", tmp_path)
    stage, method = METHODS[name]
    base = {"task": "conll2003", "backbone": backbone, "density": 0.5}
    net = load_net(backbone, get_task("conll2003"))
    scores = {f"{site.name}/scores": torch.ones(len(net.get_submodule(site.name).weight)) for site in find_sites(net)}
    save_file(scores, tmp_path / "dense" / "importance.safetensors")  # LPAF's
    steps = [fitted(tmp_path, "tagging", backbone, data, size, 8 // size, method(base), stage) for size in (8, 2)]
    assert_same(*steps)


ACROSS = {"tagging": "ddp", "language_modelling": "ddp", "summarization": "fsdp2"}
SCORED = {"limit_train_batches": 1, "limit_val_batches": 1.0}


def rank_steps(rank, folder):
    """Fit every kind on two processes; keep the gradients and dev metrics of rank 0."""
    os.environ |= {name: str(value) for name, value in processes.torchrun(rank, 2, 1).items()}
    for kind in KINDS:
        place, strategy = Path(folder) / kind, ACROSS.get(kind, "ddp")
        paths = place, kind, str(place / "backbone"), str(place / "data")
        found = [fitted(*paths, 4, 1, devices=2, strategy=strategy, **SCORED)]
        found += [fitted(*paths, n, 4 // n, devices=2, strategy=strategy) for n in (4, 2) if kind in ACROSS]
        if rank == 0:
            torch.save(found, place / "found.pt")


# over 10 s: fits of every kind with rows in parts, by one process and by two
@pytest.mark.slow
def test_two_processes_make_the_step_of_one(tmp_path):
    """Every dev example is scored once, whatever the number of inputs of a row, though ranks fill up batches."""
    alone = {}
    for kind in KINDS:
        (place := tmp_path / kind).mkdir()
        paths = made(kind, place)
        alone[kind] = [fitted(place, kind, *paths, 8, 1, **SCORED)]
        alone[kind] += [fitted(place, kind, *paths, 8, 1)] * 2 if kind in ACROSS else []
    processes.on_ranks(rank_steps, tmp_path)
    for kind, (scores, *steps) in alone.items():
        found, *others = torch.load(tmp_path / kind / "found.pt")
        assert found == pytest.approx(scores, rel=1e-5, abs=1e-5) and any(scores.values()), kind
        for some, other in zip(steps, others, strict=True):
            assert_same(some, other)
