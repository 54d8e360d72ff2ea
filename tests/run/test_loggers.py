"""Loggers that the user chose: one axis of steps, also after a stop; figures, settings and the final table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger
from mistakes import fit
from torch.utils.tensorboard import summary

from lit_compress.__main__ import main
from lit_compress.run import loggers
from lit_compress.run.callbacks import Checkpoints
from lit_compress.run.folder import Run
from lit_compress.run.loggers import log_report, log_stage


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def steps(some: list[dict[str, str]], name: str) -> list[int]:
    return [int(row["step"]) for row in some if row.get(name)]


@pytest.fixture(scope="module")
def arguments(short_run):
    return [*fit(short_run, "")[:-2], "--model.dense.epochs", "1", "--model.retrain.epochs", "1", "--trainer.logger",
            "CSVLogger", "--trainer.log_every_n_steps", "2", "--checkpoint_every", "4",
            "--trainer.callbacks", "ModelSummary"]  # fmt: skip  # one callback, not a list of them


@pytest.mark.slow
def test_a_csv_logger_has_one_file_with_all_stages_and_after_a_stop_another(arguments, tmp_path, monkeypatch, capsys):
    """Stopped in the middle of the last stage, after a checkpoint and after rows that are logged again."""
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda *_: 0.0)
    words = [*arguments, "--run_dir", str(tmp_path / "run")]
    end = Checkpoints.on_train_batch_end

    def stop(self, trainer, module, *_):
        end(self, trainer, module, *_)
        if self.folder.name == "retrain" and trainer.global_step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stop)
    with pytest.raises(SystemExit):
        main(words)
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", end)
    capsys.readouterr()
    main([*words, "--ckpt_path", "last"])
    assert "curves:" not in capsys.readouterr().out
    files = sorted((tmp_path / "run" / "logs").rglob("metrics.csv"))
    assert [file.parent.name for file in files] == ["version_0", "version_1"]
    first, second = map(rows, files)
    assert steps(first, "train/loss") == [1, 3, 5, 7, 9, 11, 13, 15, 17] and steps(first, "val/accuracy") == [12]
    assert steps(second, "train/loss") == [17, 19, 21, 23, 25] and steps(second, "val/accuracy") == [25]
    assert second[-1]["step"] == "26" and second[-1]["result/accuracy"]


REPORT = {
    "config": {"model": {"a": 1}}, "metric": {"name": "accuracy"}, "ratios": {"speedup": 1.0},
    "compressed": {"metric": 0.5, "density": 0.25, "bytes": 1, "flops": 2},
}  # fmt: skip


class Own(Logger):
    """One of another package."""

    name, version = "own", 0

    def __init__(self):
        super().__init__()
        self.got, self.ended = [], 0

    def log_metrics(self, metrics, step=None):
        self.got.append((metrics, step))

    def log_hyperparams(self, *args, **kwargs):
        self.got.append(args)

    def finalize(self, status):
        self.ended += 1


def test_any_logger_gets_the_metrics_of_a_stage_and_the_results_and_ends_with_the_report(tmp_path):
    run, logger = Run(tmp_path), Own()
    log_stage([logger], None, "prune", 107, {"val/x": 0.5}, 106)
    assert logger.got == [({"stage/prune/val/x": 0.5}, 106)]
    logger.got.clear()
    run.finish({"name": "dense", "steps": 139})
    log_report(run, REPORT, logger)
    (settings,), (results, step) = logger.got
    assert settings["model"]["a"] == 1 and results["result/accuracy"] == 0.5 and step == 139 and logger.ended == 1


def test_settings_that_are_numbers_are_logged_as_numbers(tmp_path, monkeypatch):
    """So that the tab HPARAMS can sort and plot them."""
    found, write = {}, summary.hparams
    monkeypatch.setattr(summary, "hparams", lambda values, results: found.update(values) or write(values, results))
    monkeypatch.setattr(loggers, "markdown", lambda report: "")
    settings = {"density": 0.25, "rank": None, "stacked": True, "backbone": "me/net", "examples": 8}
    log_report(Run(tmp_path), REPORT | {"config": {"model": settings, "seed_everything": 1}})
    assert found["model/density"] == 0.25 and found["model/examples"] == 8 and found["seed_everything"] == 1
    assert found["model/rank"] == "None" and found["model/backbone"] == "me/net" and found["model/stacked"] is True
