"""Loggers that the user chose: one axis of steps, also after a stop; figures, settings and the final table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger
from mistakes import fit

from lit_compress.__main__ import main
from lit_compress.run import loggers
from lit_compress.run.callbacks import Checkpoints
from lit_compress.run.folder import Run
from lit_compress.run.loggers import log_report, log_stage, stage_loggers, where_curves_are
from lit_compress.run.pages import read_curves


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
    assert f"curves: CSVLogger in {tmp_path / 'run' / 'logs'}" in capsys.readouterr().out
    files = sorted((tmp_path / "run" / "logs").rglob("metrics.csv"))
    assert [file.parent.name for file in files] == ["version_0", "version_1"]
    first, second = map(rows, files)
    assert steps(first, "train/loss") == [1, 3, 5, 7, 9, 11, 14, 16, 18] and steps(first, "val/accuracy") == [12]
    assert steps(second, "train/loss") == [18, 20, 22, 24] and steps(second, "val/accuracy") == [25]
    assert second[-1]["step"] == "26" and second[-1]["result/accuracy"]
    assert [step for step, _ in read_curves(tmp_path / "run")["train/loss"]][-4:] == [18, 20, 22, 24]


REPORT = {
    "config": {"model": {"a": 1}}, "metric": {"name": "accuracy"}, "ratios": {"speedup": 1.0},
    "compressed": {"metric": 0.5, "density": 0.25, "bytes": 1, "flops": 2},
}  # fmt: skip


def of_stage(logger: Logger, run: Run, offset: int) -> Logger:
    (shifted,) = stage_loggers(logger, run, "prune", offset, None)  # type: ignore[misc]
    return shifted


class Own(Logger):
    """One like wandb's: it takes pictures and tables."""

    name, version = "own", 0

    def __init__(self):
        super().__init__()
        self.got, self.ended = [], 0

    def log_metrics(self, metrics, step=None):
        self.got.append((metrics, step))

    def log_hyperparams(self, *args, **kwargs):
        self.got.append(args)

    def log_image(self, key, images, step):
        self.got.append((key, images, step))

    def log_table(self, key, columns, data, step):
        self.got.append((key, columns, data, step))

    def finalize(self, status):
        self.ended += 1


def test_any_logger_gets_steps_of_the_run_figures_and_the_table_and_ends_with_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.run.loggers.rows", lambda report: (["a"], [["b"]]))
    monkeypatch.setattr("lit_compress.run.loggers.site_table", lambda net: [])
    monkeypatch.setattr("lit_compress.run.loggers.structure_figure", lambda layers, stage: "figure")
    run, logger = Run(tmp_path), Own()
    shifted = of_stage(logger, run, 100)
    shifted.log_metrics({"train/loss": 1.0, "val/score": 0.5}, 5)
    log_stage([shifted], None, "prune", 7, {"val/x": 0.5}, 6)
    shifted.log_hyperparams({"b": 2})
    shifted.finalize("success")
    assert (shifted.name, shifted.version, logger.ended) == ("own", 0, 0)
    assert logger.got == [
        ({"train/loss": 1.0}, 105), ("structure", ["figure"], 107), ({"stage/prune/val/x": 0.5}, 106), ({"b": 2},),
    ]  # fmt: skip
    logger.got.clear()
    run.finish({"name": "dense", "steps": 139})
    log_report(run, REPORT, logger)
    (settings,), (results, step), table = logger.got
    assert settings["model.a"] == "1" and results["result/accuracy"] == 0.5 and step == 139
    assert table == ("report", ["a"], [["b"]], 139) and logger.ended == 1
    assert stage_loggers(False, run, "dense", 0, None) is False


def test_curves_are_in_the_store_of_mlflow(tmp_path, monkeypatch):
    init = {"tracking_uri": "sqlite:///mlflow.db", "save_dir": "./mlruns"}
    given = {"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": init}
    monkeypatch.setattr(Run, "recorded", lambda run: {"trainer": {"logger": given}})
    assert where_curves_are(Run(tmp_path)) == "MLFlowLogger in sqlite:///mlflow.db"


def test_settings_that_are_numbers_are_logged_as_numbers(tmp_path, monkeypatch):
    """So that the tab HPARAMS can sort and plot them."""
    found = {}
    monkeypatch.setattr(loggers.TensorBoardLogger, "log_hyperparams", lambda self, settings, *_: found.update(settings))
    monkeypatch.setattr(loggers, "markdown", lambda report: "")
    settings = {"density": 0.25, "rank": None, "stacked": True, "backbone": "me/net", "examples": 8}
    log_report(Run(tmp_path), REPORT | {"config": {"model": settings, "seed_everything": 1}})
    assert found["model.density"] == 0.25 and found["model.examples"] == 8 and found["seed_everything"] == 1
    assert found["model.rank"] == "None" and found["model.backbone"] == "me/net" and found["model.stacked"] is True
