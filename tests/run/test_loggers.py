"""Loggers that the user chose: one axis of steps, also after a stop; figures, settings and the final table."""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from matplotlib.figure import Figure
from mistakes import fit

from lit_compress.__main__ import main
from lit_compress.run import tensorboard
from lit_compress.run.callbacks import Checkpoints
from lit_compress.run.folder import Run
from lit_compress.run.loggers import log_figure, log_report, stage_loggers, where_curves_are


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def arguments(short_run):
    return [*fit(short_run, "")[:-2], "--model.dense.epochs", "1", "--model.retrain.epochs", "1", "--trainer.logger",
            "CSVLogger", "--trainer.log_every_n_steps", "2", "--checkpoint_every", "4",
            "--trainer.callbacks", "ModelSummary"]  # fmt: skip  # one callback, not a list of them


def test_a_csv_logger_has_one_file_with_all_stages_also_after_a_stop(arguments, tmp_path, monkeypatch, capsys):
    """Stopped in the middle of the last stage, after a checkpoint and after rows that are logged again."""
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)
    words = [*arguments, "--run_dir", str(tmp_path / "run")]
    end = Checkpoints.on_train_batch_end

    def stop(self, trainer, module, *_):
        end(self, trainer, module, *_)
        if self.folder.name == "retrain" and trainer.global_step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stop)
    with pytest.raises(SystemExit):
        main(words)
    before = rows(tmp_path / "run" / "logs")
    assert before[-1]["step"] == "18"  # of the run: 13 of the dense stage, and 5 of this
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", end)
    main([*words, "--ckpt_path", "last"])
    assert f"curves: CSVLogger in {tmp_path / 'run' / 'logs'}" in capsys.readouterr().out
    found = rows(tmp_path / "run" / "logs")
    trained = [int(row["step"]) for row in found if row["train/loss"]]
    assert trained == [1, 3, 5, 7, 9, 11, *(13 + step for step in (1, 3, 5, 7, 9, 11))]
    same = [(row["step"], row["train/loss"]) for row in before if row["train/loss"]]
    assert same == [(row["step"], row["train/loss"]) for row in found if row["train/loss"]][: len(same)]
    assert [row["step"] for row in found if row["val/accuracy"]] == ["12", "25"]
    assert found[-1]["step"] == "26" and found[-1]["result/accuracy"]
    (folder,) = (tmp_path / "run" / "logs").glob("*/*")
    assert {"dense-structure.png", "retrain-structure.png", "report.md", "hparams.yaml"} <= {
        path.name for path in folder.iterdir()
    }
    assert "site density" in (folder / "report.md").read_text()


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


def continued(make, run: Run, stage="prune", offset=100, step=None) -> Logger:
    (logger,) = stage_loggers(make(), run, stage, offset, step)  # type: ignore[misc]
    return logger


def test_wandb_gets_steps_of_the_run_figures_and_the_table(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.run.loggers.rows", lambda report: (["a"], [["b"]]))
    run, figure = Run(tmp_path / "run:1"), Figure()
    logger = continued(WandbLogger, run)
    logger.log_metrics({"train/loss": 1.0}, 5)
    log_figure(logger, "mask", figure, 7, "prune")
    run.finish({"name": "dense", "steps": 9})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Lightning's, that a run is in progress
        log_report(run, REPORT, WandbLogger())
    assert wandb.run is None  # so that another run of this process gets its own
    loss, picture, _, table = wandb.logged
    assert loss == {"train/loss": 1.0, "trainer/global_step": 105}
    assert picture == {"mask": [figure], "trainer/global_step": 107}
    assert table["report"] == {"columns": ["a"], "data": [["b"]], "dataframe": None}
    continued(WandbLogger, run, "retrain", 130).log_metrics({"x": 1.0}, 0)
    assert wandb.begun[0]["id"].startswith("run-1-") and wandb.begun[1] == wandb.begun[0]
    assert wandb.logged[-1]["trainer/global_step"] == 130


def test_mlflow_gets_them_in_one_run(mlflow, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.run.loggers.markdown", lambda report: "| a |")
    run, figure = Run(tmp_path / "run"), Figure()
    make = lambda: MLFlowLogger(tracking_uri=f"file:{tmp_path}")  # noqa: E731
    logger = continued(make, run)
    logger.log_metrics({"train/loss": 1.0}, 5)
    log_figure(logger, "mask", figure, 7, "prune")
    run.finish({"name": "dense", "steps": 9})
    log_report(run, REPORT, make())
    calls = {name: (args, kwargs) for name, args, kwargs in reversed(mlflow)}
    assert calls["log_batch"][1]["metrics"][0].step == 105 and calls["log_batch"][1]["run_id"] == "made"
    assert calls["log_figure"][0] == ("made", figure, "prune-mask.png")
    assert calls["log_text"][0] == ("made", "| a |", "report.md")
    assert [name for name, *_ in mlflow].count("create_run") == 1 and calls["get_run"][0] == ("made",)


def test_a_run_of_wandb_that_the_user_began_is_not_ended(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_compress.run.loggers.rows", lambda report: (["a"], [["b"]]))
    own, run = wandb.init(id="own"), Run(tmp_path)
    run.finish({"name": "dense", "steps": 9})
    with pytest.warns(UserWarning, match="already in progress"):
        log_report(run, REPORT, WandbLogger())
    assert wandb.run is own and "report" in wandb.logged[-1]


@pytest.mark.parametrize("prefix", ["", "own"])
def test_mlflow_which_drops_nothing_gets_nothing_twice(mlflow, tmp_path, prefix):
    """Stopped at step 6, after the checkpoint of step 4 and after the metric of training of step 6."""
    run = Run(tmp_path / "run")
    make = lambda: MLFlowLogger(tracking_uri=f"file:{tmp_path}", prefix=prefix)  # noqa: E731
    for step in (None, 4):
        logger = continued(make, run, "prune", 10, step)
        for number in range(step or 0, 7):
            logger.log_metrics({"train/loss": 1.0}, number)
            if step or number < 6:
                logger.log_metrics({"val/accuracy": 1.0}, number)
    for name in ("train/loss", "val/accuracy"):
        key = f"{prefix}-{name}" if prefix else name
        logged = [metric.step for _, _, given in mlflow for metric in given.get("metrics", []) if metric.key == key]
        assert logged == [*range(10, 17)]
    assert ("update_run", ("made", "RUNNING"), {}) in mlflow


def test_a_logger_that_is_not_known_gets_the_steps(tmp_path):
    got = []

    class Own(Logger):
        name, version = "own", 0

        def log_metrics(self, metrics, step=None):
            got.append((metrics, step))

        def log_hyperparams(self, *args, **kwargs):
            pass

    logger = continued(Own, Run(tmp_path))
    logger.log_metrics({"a": 1}, 2)
    log_figure(logger, "mask", Figure(), 7, "prune")
    assert got == [({"a": 1}, 102)] and not (tmp_path / "loggers.json").exists()
    assert stage_loggers(False, Run(tmp_path), "dense", 0, None) is False


def test_curves_are_in_the_store_of_mlflow(tmp_path, monkeypatch):
    init = {"tracking_uri": "sqlite:///mlflow.db", "save_dir": "./mlruns"}
    given = {"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": init}
    monkeypatch.setattr(Run, "recorded", lambda run: {"trainer": {"logger": given}})
    assert where_curves_are(Run(tmp_path)) == "MLFlowLogger in sqlite:///mlflow.db"


def test_a_version_that_is_named_holds_all_stages(tmp_path):
    make = lambda: CSVLogger(tmp_path, version="mine")  # noqa: E731
    run = Run(tmp_path / "run")
    for stage, offset, step in (("dense", 0, None), ("prune", 10, None), ("prune", 10, 4)):
        logger = continued(make, run, stage, offset, step)
        for number in range(step or 0, 6):
            logger.log_metrics({f"{stage}/loss": float(number)}, number)
        logger.save()
    found = rows(tmp_path / "lightning_logs")
    assert [int(row["step"]) for row in found] == [*range(6), *range(10, 16)]
    assert found[-1]["prune/loss"] == "5.0" and found[0]["dense/loss"] == "0.0"


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
