"""Loggers that the user chose: one axis of steps, also after a stop; figures, settings and the final table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from mistakes import fit

from lit_compress.__main__ import main
from lit_compress.run import tensorboard
from lit_compress.run.callbacks import Checkpoints
from lit_compress.run.curves import read_curves
from lit_compress.run.folder import Run
from lit_compress.run.loggers import log_report, log_stage, stage_loggers, where_curves_are


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def arguments(short_run):
    return [*fit(short_run, "")[:-2], "--model.dense.epochs", "1", "--model.retrain.epochs", "1", "--trainer.logger",
            "CSVLogger", "--trainer.log_every_n_steps", "2", "--checkpoint_every", "4",
            "--trainer.callbacks", "ModelSummary"]  # fmt: skip  # one callback, not a list of them


def test_a_csv_logger_has_one_file_with_all_stages_and_after_a_stop_another(arguments, tmp_path, monkeypatch, capsys):
    """Stopped in the middle of the last stage, after a checkpoint and after rows that are logged again."""
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)
    main([*arguments, "--run_dir", str(tmp_path / "whole")])
    whole = rows(tmp_path / "whole" / "logs")
    assert [int(row["step"]) for row in whole if row["train/loss"]] == [1, 3, 5, 7, 9, 11, *(14, 16, 18, 20, 22, 24)]
    assert [row["step"] for row in whole if row["val/accuracy"]] == ["12", "25"]
    assert whole[-1]["step"] == "26" and whole[-1]["result/accuracy"]
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
    first, second = sorted((tmp_path / "run" / "logs").rglob("metrics.csv"))
    curves = {name: {point for point in points} for name, points in read_curves(tmp_path / "run").items()}
    assert curves == {name: {*points} for name, points in read_curves(tmp_path / "whole").items()}
    assert first.parent.name == "version_0" and second.parent.name == "version_1"


# ------------------------------------------------------------------------- fakes of packages that are not installed


@pytest.fixture
def wandb(monkeypatch):
    """What Lightning's logger needs of wandb; ``logged`` has what it got."""
    module, run = ModuleType("wandb"), ModuleType("wandb.wandb_run")
    module.run, module.logged, module.begun = None, [], []  # type: ignore[attr-defined]

    def init(**settings):
        module.begun.append(settings)
        module.run = SimpleNamespace(log=module.logged.append, config=SimpleNamespace(update=lambda *_, **__: None),
                                     id=settings["id"], name="x",
                                     finish=lambda: setattr(module, "run", None))  # fmt: skip
        return module.run

    module.init, module.Image, module.Table = init, lambda image: image, lambda **table: table  # type: ignore
    run.Run = type("Run", (), {})  # type: ignore[attr-defined]
    library = ModuleType("wandb.sdk.lib")
    library.RunDisabled = type("RunDisabled", (), {})  # type: ignore[attr-defined]
    for name, value in {"wandb": module, "wandb.wandb_run": run, "wandb.sdk": ModuleType("wandb.sdk"),
                        "wandb.sdk.lib": library}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    """What Lightning's logger needs of mlflow; ``calls`` has what its client got."""
    calls = []

    class Client:
        def __init__(self, uri):
            self.uri = uri

        def __getattr__(self, name):
            def call(*args, **kwargs):
                calls.append((name, args, kwargs))
                info = SimpleNamespace(experiment_id="7", run_id=args[0] if name == "get_run" else "made")
                logged = [metric for _, _, given in calls for metric in given.get("metrics", [])]
                if name == "get_metric_history":
                    return [metric for metric in logged if metric.key == args[1]]
                data = SimpleNamespace(metrics={metric.key: metric.value for metric in logged})
                return SimpleNamespace(experiment_id="7", lifecycle_stage="active", info=info, data=data)

            return call

    names = {
        "mlflow": {"set_tracking_uri": lambda uri: None}, "mlflow.tracking": {"MlflowClient": Client},
        "mlflow.tracking.context": {}, "mlflow.tracking.context.registry": {"resolve_tags": lambda tags=None: tags},
        "mlflow.entities": {"Metric": SimpleNamespace, "Param": SimpleNamespace},
        "mlflow.utils": {}, "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "run"},
    }  # fmt: skip
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)
    return calls


REPORT = {
    "config": {"model": {"a": 1}}, "metric": {"name": "accuracy"}, "ratios": {"speedup": 1.0},
    "compressed": {"metric": 0.5, "density": 0.25, "bytes": 1, "flops": 2},
}  # fmt: skip


def of_stage(logger: Logger, run: Run, offset: int) -> Logger:
    (shifted,) = stage_loggers(logger, run, "prune", offset, None)  # type: ignore[misc]
    return shifted


def test_wandb_gets_steps_of_the_run_figures_and_the_table(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.run.loggers.rows", lambda report: (["a"], [["b"]]))
    monkeypatch.setattr("lit_compress.run.loggers.structure_figure", lambda net, stage: "figure")
    run, logger = Run(tmp_path), WandbLogger()
    of_stage(logger, run, 100).log_metrics({"train/loss": 1.0}, 5)
    log_stage([of_stage(logger, run, 100)], None, "prune", 7, {"val/x": 0.5}, 6)
    of_stage(logger, run, 130).log_metrics({"x": 1.0}, 0)
    run.finish({"name": "dense", "steps": 139})
    log_report(run, REPORT, logger)
    assert len(wandb.begun) == 1
    loss, picture, score, later, result, table = wandb.logged
    assert loss == {"train/loss": 1.0, "trainer/global_step": 105}
    assert picture == {"structure": ["figure"], "trainer/global_step": 107}
    assert score == {"stage/prune/val/x": 0.5, "trainer/global_step": 106} and later["trainer/global_step"] == 130
    assert result["result/accuracy"] == 0.5 and table["report"]["data"] == [["b"]]
    assert result["trainer/global_step"] == table["trainer/global_step"] == 139


def test_mlflow_has_one_run_that_ends_with_the_report(mlflow, tmp_path):
    run, logger = Run(tmp_path), MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    for offset in (0, 100):
        stage = of_stage(logger, run, offset)
        stage.log_metrics({"train/loss": 1.0}, 5)
        stage.finalize("success")
    names = [name for name, *_ in mlflow]
    assert names.count("create_run") == 1 and "set_terminated" not in names
    run.finish({"name": "dense", "steps": 9})
    log_report(run, REPORT, logger)
    steps = [given["metrics"][0].step for name, _, given in mlflow if name == "log_batch" and "metrics" in given]
    assert steps[:2] == [5, 105] and [name for name, *_ in mlflow].count("set_terminated") == 1


def test_a_logger_that_is_not_known_gets_the_steps(tmp_path):
    got = []

    class Own(Logger):
        name, version = "own", 0

        def log_metrics(self, metrics, step=None):
            got.append((metrics, step))

        def log_hyperparams(self, *args, **kwargs):
            got.append(args)

    shifted = of_stage(Own(), Run(tmp_path), 100)
    shifted.log_metrics({"a": 1}, 2)
    shifted.log_hyperparams({"b": 2})
    assert got == [({"a": 1}, 102), ({"b": 2},)] and (shifted.name, shifted.version) == ("own", 0)
    assert stage_loggers(False, Run(tmp_path), "dense", 0, None) is False


def test_curves_are_in_the_store_of_mlflow(tmp_path, monkeypatch):
    init = {"tracking_uri": "sqlite:///mlflow.db", "save_dir": "./mlruns"}
    given = {"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": init}
    monkeypatch.setattr(Run, "recorded", lambda run: {"trainer": {"logger": given}})
    assert where_curves_are(Run(tmp_path)) == "MLFlowLogger in sqlite:///mlflow.db"


def test_settings_that_are_numbers_are_logged_as_numbers(tmp_path, monkeypatch):
    """So that the tab HPARAMS can sort and plot them."""
    found = {}
    monkeypatch.setattr(tensorboard.RunLogger, "log_hyperparams", lambda self, settings, *_: found.update(settings))
    monkeypatch.setattr(tensorboard, "markdown", lambda report: "")
    monkeypatch.setattr(tensorboard, "results_of", lambda report: {})
    settings = {"density": 0.25, "rank": None, "stacked": True, "backbone": "me/net", "examples": 8}
    tensorboard.write_report(Run(tmp_path), {"config": {"model": settings, "seed_everything": 1}}, 1)
    assert found["model.density"] == 0.25 and found["model.examples"] == 8 and found["seed_everything"] == 1
    assert found["model.rank"] == "None" and found["model.backbone"] == "me/net" and found["model.stacked"] is True
