"""Checkpoints stand where a run can go on from: between two batches of an epoch, at the end of an accumulation."""

from __future__ import annotations

import json
import shutil
from math import inf
from types import SimpleNamespace

import pytest
import torch

from lit_compress.__main__ import main
from lit_compress.run.callbacks import Checkpoints, StageBar
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.gated import GatedStage
from lit_compress.stages.unstructured import CubicStage
from lit_compress.tasks.records import get_task
from lit_compress.utils.manifest import difference


def args(short_run, folder, *extra):
    return ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(folder), *extra]


@pytest.mark.slow
def test_last_is_never_written_after_the_last_batch_and_max_steps_ends_with_a_validation(
    short_run, tmp_path, monkeypatch
):
    """7 batches an epoch: 10 steps end in the second, which is validated; the best is there."""
    seen = []
    save = Checkpoints._save

    def note(self, trainer, name, weights_only=False):
        seen.append((name, trainer.global_step, trainer.is_last_batch))
        save(self, trainer, name, weights_only)

    monkeypatch.setattr(Checkpoints, "_save", note)
    extra = ["--checkpoint_every", "1", "--trainer.accumulate_grad_batches", "2", "--trainer.max_steps", "10"]
    main(args(short_run, tmp_path / "run", *extra))
    last = [entry for entry in seen if entry[0] == "last.ckpt"]
    assert [step for _, step, _ in last] == [1, 2, 3, 4, 5, 6, 8, 9] * 2 and not any(end for _, _, end in last)
    assert {step for name, step, _ in seen if name == "best.ckpt"} <= {0, 7, 10}
    records = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert [record["steps"] for record in records] == [10, 10]
    assert all(record["best_step"] in (7, 10) for record in records)
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_last_is_never_written_before_a_validation_and_the_last_step_has_one(short_run, tmp_path, monkeypatch):
    """A run that was killed in a validation went on behind it, and could not choose its model."""
    seen = []
    save, end = Checkpoints._save, Checkpoints.on_validation_end

    def note(self, trainer, name, weights_only=False):
        seen.append((name, trainer.global_step))
        save(self, trainer, name, weights_only)

    def validated(self, trainer, module):
        seen.append(("validation", trainer.global_step))
        end(self, trainer, module)

    monkeypatch.setattr(Checkpoints, "_save", note)
    monkeypatch.setattr(Checkpoints, "on_validation_end", validated)
    extra = ["--checkpoint_every", "1", "--trainer.val_check_interval", "5", "--model.retrain.epochs", "0"]
    main(args(short_run, tmp_path / "run", *extra))
    steps = {what: [step for name, step in seen if name == what] for what in ("validation", "last.ckpt")}
    assert steps["validation"][1:7] == [5, 10, 18, 23, 26, 0]
    assert steps["last.ckpt"] == [step for step in range(1, 26) if step not in (5, 10, 13, 18, 23)]


@pytest.mark.slow
def test_a_part_of_the_dev_set_chooses_and_the_whole_is_reported(short_run, tmp_path):
    extra = ["--trainer.limit_val_batches", "1", "--data.eval_batch_size", "6", "--model.retrain.epochs", "0"]
    main(args(short_run, tmp_path / "run", *extra))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    dense, small = json.loads((tmp_path / "run" / "stages.json").read_text())
    for record, entry in ((dense, report["dense"]), (small, report["compressed"])):
        rows = (metric := record["metric"]["val/accuracy"]) * 40
        assert rows == pytest.approx(round(rows), abs=1e-4) and record["initial"] == {} and entry["metric"] == metric


@pytest.mark.slow
def test_tensorboard_has_a_folder_per_stage_on_one_axis_of_steps(short_run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    main(args(short_run, folder))
    assert {path.name for path in (folder / "tensorboard").iterdir()} == {"dense", "retrain", "report"}
    assert not list(folder.rglob("*.ckpt"))
    net, export = folder / "retrain" / "net", folder / "export"
    assert (net / "model.safetensors").samefile(export / "model.safetensors")
    assert difference(net) is difference(export) is None
    assert all(len(list((folder / "tensorboard" / name).glob("events.*"))) == 1 for name in ("dense", "retrain"))
    dense, events = (EventAccumulator(str(folder / "tensorboard" / n)).Reload() for n in ("dense", "retrain"))
    tags = events.Tags()
    wanted = {"train/loss", "train/task", "train/distillation", "train/learning_rate", "train/density",
              "val/accuracy", "val/loss", "epoch", "stage/retrain/val/accuracy"}  # fmt: skip
    assert wanted <= set(tags["scalars"]) and "val/score" not in tags["scalars"]
    assert "stage/dense/val/accuracy" in dense.Tags()["scalars"] and not any(" " in tag for tag in tags["scalars"])
    assert [event.value for event in events.Scalars("epoch")][-1] == 1
    assert "structure" in tags["images"]
    found = [
        EventAccumulator(str(path)).Reload() for path in {p.parent for p in folder.glob("tensorboard/report/**/ev*")}
    ]
    assert any("report/text_summary" in events.Tags()["tensors"] for events in found)
    assert any("result/density" in events.Tags()["scalars"] for events in found)
    first = json.loads((folder / "stages.json").read_text())[0]["steps"]
    assert dense.Scalars("train/loss")[-1].step <= first < events.Scalars("train/loss")[-1].step
    shutil.rmtree(folder)


@pytest.mark.slow
def test_where_no_epoch_is_at_budget_the_last_is_kept(short_run, tmp_path, monkeypatch):
    """Of gates that have not arrived: the epoch nearest to the target, not the first."""
    monkeypatch.setattr(Stage, "at_budget", lambda self, step: False)
    with pytest.warns(UserWarning, match="retrain: no epoch ended at the budget; the last is kept"):
        main(args(short_run, tmp_path / "run", "--trainer.callbacks+=test_finite_steps.PoisonThird"))
    records = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert [record["skipped"] for record in records] == [1, 1]
    assert [record["best_step"] for record in records] == [record["steps"] for record in records]


class Trainer:
    """Stands for Lightning's: validations with given scores."""

    def __init__(self, folder):
        self.folder, self.sanity_checking, self.max_epochs, self.global_step = folder, False, 3, 0
        self.is_global_zero, self.callback_metrics = True, {}

    def save_checkpoint(self, path, weights_only):
        path.write_text(str(self.global_step))


@pytest.mark.parametrize(
    ("untrained", "scores", "best"),
    [
        (0.865, [0.83, 0.83], 0),
        (0.83, [0.83, 0.83], 1),  # equal: an epoch, the first one
        (0.5, [0.83, 0.9], 2),
        (-inf, [0.83, 0.9], 2),  # above the budget before training
        (0.9, [-inf, -inf], 0),
        (0.9, [-inf, 0.95], 2),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_the_model_before_training_counts_as_epoch_0(untrained, scores, best, killed, tmp_path, capsys):
    stage = Stage(tmp_path.name, Training())
    trainer, module = (
        Trainer(tmp_path),
        SimpleNamespace(net=None, untrained=untrained, task=get_task("sst2"), stage=stage),
    )
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.on_sanity_check_end(trainer, module)
    for step, score in enumerate(scores, start=1):
        if killed:
            state, checkpoints = checkpoints.state_dict(), Checkpoints(tmp_path, 1)
            checkpoints.load_state_dict(state)
        trainer.global_step, trainer.callback_metrics = step, {"val/score": torch.tensor(score, dtype=torch.float64)}
        checkpoints.on_validation_end(trainer, module)
    checkpoints.on_fit_end(trainer, module)
    assert (tmp_path / "best.ckpt").read_text() == str(best)
    told = f"the model before training, dev accuracy {untrained:.4f}, is better than every epoch at the budget"
    assert (told in capsys.readouterr().err) == (best == 0)


@pytest.mark.parametrize("kind", [CubicStage, GatedStage])
def test_gradual_pruning_is_not_at_budget_before_a_step(kind):
    stage = SimpleNamespace(_warmup=0, total_steps=10, _end=10)
    assert not kind.at_budget(stage, 0)


def test_the_bar_reads_the_loss_when_it_is_drawn(short_run, tmp_path, monkeypatch):
    """Lightning would read what is logged for the bar in every step, and wait for it."""
    shown, read = [], []

    def set_postfix(self, trainer, *args):
        read.append(dict(trainer.progress_bar_metrics))
        shown.append(plain(self, trainer, *args))
        return shown[-1]

    plain = StageBar.get_metrics
    monkeypatch.setattr(StageBar, "get_metrics", set_postfix)
    args = [*short_run, "--trainer.enable_progress_bar", "true", "--model.retrain.epochs", "0"]
    main(["fit", "--model", "SVD", *args, "--trainer.logger", "false", "--run_dir", str(tmp_path / "run")])
    losses = [metrics["loss"] for metrics in shown if "loss" in metrics]
    assert losses and all(isinstance(loss, float) for loss in losses)
    assert not any("train/loss" in metrics for metrics in read)
