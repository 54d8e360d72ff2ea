"""The loggers of a run: steps of all stages on one axis, figures of every model, the final table; also after a resume.

Without an own logger a run has TensorBoard (tensorboard.py). Any logger of Lightning can replace it: its steps are
shifted by the earlier stages' steps. All stages share the first one's version (CSV, TensorBoard) or run (wandb,
MLflow), which ``RUN/loggers.json`` keeps. After a resume CSV and TensorBoard drop repeated steps. MLflow, which drops
nothing, does not get them again. wandb does, because a killed process loses the steps that wandb has not yet written.
Figures and tables go to loggers that can take them; for a CSV logger they are files in its folder.
"""

from __future__ import annotations

import csv
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.analysis.pictures import structure_figure
from lit_compress.export.report import markdown, rows
from lit_compress.run.folder import Run, is_first_process
from lit_compress.run.tensorboard import (
    RunLogger,
    log_histograms,
    results_of,
    settings_of,
    write_report,
)
from lit_compress.utils.files import read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

KEPT = "loggers.json"


def stage_loggers(given: Any, run: Run, stage: str, offset: int, step: int | None) -> list[Logger] | bool:
    """Return the loggers of one stage.

    Args:
        given: the user's choice for the Trainer: a logger, several, True or None for TensorBoard, False for none.
        run: the run.
        stage: its name.
        offset: optimizer steps of the stages before.
        step: of the stage, at which it continues; None if it starts.
    """
    if given in (None, True):
        return [RunLogger(run.folder, stage, offset, None if step is None else offset + step + 1)]
    if given is False:
        return False
    start = offset + (0 if step is None else step)
    loggers = enumerate(given if isinstance(given, list | tuple) else [given])
    return [_continued(logger, f"{i} {type(logger).__name__}", run, offset, start) for i, logger in loggers]


def _continued(logger: Logger, key: str, run: Run, offset: int, start: int) -> Logger:
    """Return ``logger`` at the version or run of the earlier stages, with its steps shifted; ``start``: its first."""
    begun = is_first_process() and _keep_one_version(logger, key, run)
    logged: dict[str, int] = {}
    if begun and isinstance(logger, TensorBoardLogger):
        logger._kwargs["purge_step"] = start
    elif begun and isinstance(logger, CSVLogger):
        _keep_rows(logger, start)
    elif begun and isinstance(logger, MLFlowLogger):
        logged = _last_steps(logger)
        logger.experiment.update_run(logger.run_id, "RUNNING")  # at the end of a stage it is FINISHED
    logger.offset = offset  # type: ignore[attr-defined]
    inner = logger.log_metrics

    def log_metrics(metrics: Any, step: int | None = None) -> None:
        at = (step or 0) + offset
        if new := {name: value for name, value in metrics.items() if at > logged.get(name, -1)}:
            inner(new, at)

    logger.log_metrics = log_metrics  # type: ignore[method-assign]
    return logger


def _keep_one_version(logger: Logger, key: str, run: Run) -> bool:
    """Give ``logger`` the version of the run's first stage, or keep its own as that; say whether there was one.

    The command line has made the logger already, so that its constructor's ``version``, ``id`` or ``run_id`` is past.
    """
    path = run.folder / KEPT
    kept = read_json("run_dir", path, dict) if path.is_file() else {}
    new: Callable[[], int | str | None]
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        name, new = "_version", lambda: logger.version
    elif isinstance(logger, WandbLogger):
        usable = re.sub(r"[^\w-]", "-", run.folder.name)[:64]
        name, new = "_id", lambda: logger.version or f"{usable}-{uuid.uuid4().hex[:8]}"
    elif isinstance(logger, MLFlowLogger):
        name, new = "_run_id", lambda: logger.run_id
    else:
        return False
    known = key in kept
    setattr(logger, name, kept[key] if known else new())
    if isinstance(logger, WandbLogger):
        import wandb

        logger._wandb_init["id"] = logger.version
        if wandb.run is not None and wandb.run.id == logger.version:  # of the stage before; Lightning takes it, warning
            logger._experiment = wandb.run
    if not known:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**kept, key: getattr(logger, name)})
    return known


def _last_steps(logger: MLFlowLogger) -> dict[str, int]:
    """Return the last step of every metric that MLflow has of the run."""
    client, run = logger.experiment, logger.run_id
    names = client.get_run(run).data.metrics
    last = {name: max(metric.step for metric in client.get_metric_history(run, name)) for name in names}
    return {name.removeprefix(f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}"): step for name, step in last.items()}


def _keep_rows(logger: CSVLogger, start: int) -> None:
    """Let a CSV logger go on in its file, without the rows from ``start`` on; its own way is to remove the file."""
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return
    with path.open(newline="") as file:
        kept = [row for row in csv.DictReader(file) if row.get("step") and int(row["step"]) < start]
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that files of the folder will be deleted; the only one is gone
        writer = logger.experiment
    writer.metrics = [{name: value for name, value in row.items() if value} for row in kept]  # type: ignore[misc]
    logger.save()


# ------------------------------------------------------------------------------------------- figures and tables


def log_stage(
    loggers: Iterable[Logger], net: PreTrainedModel, stage: str, steps: int, scores: dict[str, float], best: int
) -> None:
    """Log a finished stage: the figure of its model, histograms where they can be shown, and its dev metrics.

    Args:
        loggers: of the stage, as :func:`stage_loggers` made them.
        net: of the finished stage.
        stage: its name.
        steps: of the stage.
        scores: dev metrics by name.
        best: step of the stage that they are of.
    """
    if not (loggers := list(loggers)):
        return
    figure = structure_figure(net, stage)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            log_histograms(logger.experiment, net, _offset(logger) + steps)
        log_figure(logger, "structure", figure, steps, stage)
        logger.log_metrics({f"stage/{stage}/{key}": value for key, value in scores.items()}, best)
        if isinstance(logger, RunLogger):
            logger.close()
        else:
            logger.save()


def _offset(logger: Logger) -> int:
    return getattr(logger, "offset", 0)


def log_figure(logger: Logger, name: str, figure: Figure, step: int, stage: str) -> None:
    """Give a figure to a logger that can take one: TensorBoard's, wandb's, MLflow's and Comet's; CSV: a PNG file.

    Args:
        logger: as :func:`stage_loggers` made it.
        name: of the figure.
        figure: of matplotlib.
        step: of the stage.
        stage: its name.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_figure(name, figure, _offset(logger) + step)
    elif hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[figure], step=step)  # by log_metrics, which shifts the step
    elif isinstance(logger, CSVLogger):
        Path(logger.log_dir).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(logger.log_dir) / f"{stage}-{name}.png")
    elif log := _method(logger, "log_figure"):
        if hasattr(logger, "run_id"):
            log(logger.run_id, figure, f"{stage}-{name}.png")
        else:
            log(f"{stage} {name}", figure, step=_offset(logger) + step)


def _method(logger: Logger, name: str) -> Callable[..., Any] | None:
    """Return a method of a logger's backend, if it has that."""
    return getattr(getattr(logger, "experiment", None), name, None)


@rank_zero_only
def log_report(run: Run, report: dict[str, Any], given: Any = None) -> None:
    """Log the final table, and the settings of the run next to its results, to the loggers of the run.

    Args:
        run: a finished run.
        report: its report.
        given: the user's choice for the Trainer; see :func:`stage_loggers`.
    """
    steps = sum(record["steps"] for record in run.finished().values())
    if given in (None, True, False):
        return write_report(run, report, steps)
    for logger in stage_loggers(given, run, "report", steps, 1) or ():  # type: ignore[union-attr]
        logger.log_hyperparams({key: str(value) for key, value in settings_of(report).items()})
        logger.log_metrics(results_of(report), 0)
        _log_table(logger, report)
        logger.save()
        logger.finalize("success")
        if (
            isinstance(logger, WandbLogger) and logger.experiment.id == logger._wandb_init["id"]
        ):  # not the user's own run
            logger.experiment.finish()


def _log_table(logger: Logger, report: dict[str, Any]) -> None:
    """Give the final table to a logger that can take one."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("report", markdown(report), _offset(logger))
    elif hasattr(logger, "log_table"):
        header, body = rows(report)
        logger.log_table(key="report", columns=header, data=body, step=0)
    elif isinstance(logger, CSVLogger):
        (Path(logger.log_dir) / "report.md").write_text(markdown(report) + "\n", encoding="utf-8")
    elif log := _method(logger, "log_text"):
        log(*([logger.run_id] if hasattr(logger, "run_id") else []), markdown(report), "report.md")


def where_curves_are(run: Run) -> str:
    """Return how the curves of a run are looked at, or where they are."""
    given = run.recorded().get("trainer", {}).get("logger")
    if not isinstance(given, dict | list):
        return f"tensorboard --logdir {run.folder}"
    return ", ".join(map(_place, given if isinstance(given, list) else [given]))


def _place(logger: dict[str, Any]) -> str:
    """Return class and store or folder of a logger in a config."""
    name, init = logger["class_path"].rpartition(".")[2], logger.get("init_args") or {}
    folder = init.get("save_dir") or init.get("dir")
    place = init.get("tracking_uri") or (folder and os.path.abspath(folder))
    return f"{name} in {place}" if place else name
