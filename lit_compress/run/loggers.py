"""The loggers of a run: steps of all stages on one axis, the figure of every model, the final table.

Without an own logger a run has TensorBoard, a folder for every stage. Any logger of Lightning can replace it. All
stages of a process have the same one, as Lightning has it; :class:`Shifted` adds the steps of the earlier stages. A run
that continues in another process gets a new version of a CSV file, or a new run of wandb or MLflow, unless the user
names the one to continue. The steps since the last checkpoint are logged again there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.analysis.pictures import site_table, structure_figure
from lit_compress.export.table import markdown, rows
from lit_compress.run.folder import Run, flatten

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CURVES = "tensorboard"  # folder of a run


class Shifted(Logger):
    """A logger in one stage: it gets the steps of the run, and is not ended with the stage.

    Args:
        inner: Lightning's.
        offset: optimizer steps of the earlier stages.
    """

    def __init__(self, inner: Logger, offset: int) -> None:
        super().__init__()
        self.inner, self.offset = inner, offset

    @property
    def name(self) -> str | None:
        """The inner logger's."""
        return self.inner.name

    @property
    def version(self) -> int | str | None:
        """The inner logger's."""
        return self.inner.version

    @property
    def save_dir(self) -> str | None:
        """The inner logger's."""
        return self.inner.save_dir

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics at the step of the run; the score, which is a metric's again, is left out."""
        self.inner.log_metrics({k: v for k, v in metrics.items() if k != "val/score"}, (step or 0) + self.offset)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log hyperparameters."""
        self.inner.log_hyperparams(*args, **kwargs)

    def save(self) -> None:
        """Write the logged values; TensorBoard no file of hyperparameters, which the run's config.yaml has."""
        if isinstance(self.inner, TensorBoardLogger):
            self.inner.experiment.flush()
        else:
            self.inner.save()

    def finalize(self, status: str) -> None:
        """Write the logged values; pictures of the stage, or the next stage, go on with the same logger."""
        self.save()


def _tensorboard(run: Run, name: str, purge_step: int | None = None) -> TensorBoardLogger:
    return TensorBoardLogger(run.folder, CURVES, name, default_hp_metric=False, purge_step=purge_step)


def stage_loggers(given: Any, run: Run, stage: str, offset: int, step: int | None) -> list[Logger] | bool:
    """Return the loggers of one stage.

    Args:
        given: the user's choice for the Trainer: a logger, several, True or None for TensorBoard, False for none.
        run: the run.
        stage: its name.
        offset: optimizer steps of the stages before.
        step: of the stage, at which it continues; None if it starts.
    """
    if given is False:
        return False
    if given in (None, True):
        given = _tensorboard(run, stage, None if step is None else offset + step + 1)
    return [Shifted(logger, offset) for logger in (given if isinstance(given, list | tuple) else [given])]


def log_stage(
    loggers: Iterable[Logger], net: PreTrainedModel, stage: str, steps: int, scores: dict[str, float], best: int
) -> None:
    """Log a finished stage: the figure of its model, and its dev metrics.

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
    figure = structure_figure(site_table(net), stage)
    for logger in loggers:
        inner, at = getattr(logger, "inner", logger), getattr(logger, "offset", 0) + steps
        if isinstance(inner, TensorBoardLogger):
            inner.experiment.add_figure("structure", figure, at)
        elif hasattr(inner, "log_image"):  # such as wandb's
            inner.log_image(key="structure", images=[figure], step=at)
        logger.log_metrics({f"stage/{stage}/{key}": value for key, value in scores.items()}, best)
        logger.save()


@rank_zero_only
def log_report(run: Run, report: dict[str, Any], given: Any = None) -> None:
    """Log the final table, and the settings of the run next to its results, to the loggers of the run; end them.

    Args:
        run: a finished run.
        report: its report.
        given: the user's choice for the Trainer; see :func:`stage_loggers`.
    """
    steps = sum(record["steps"] for record in run.finished().values())
    own = given in (None, True, False)
    settings = flatten({key: report["config"].get(key) for key in ("model", "data", "seed_everything")})
    results = {
        f"result/{report['metric']['name']}": report["compressed"]["metric"],
        **{f"result/{name}": report["compressed"][name] for name in ("density", "bytes", "flops")},
        "result/speedup": report["ratios"]["speedup"],
    }
    for logger in [_tensorboard(run, "report")] if own else given if isinstance(given, list | tuple) else [given]:
        if own:  # the tab HPARAMS sorts and plots numbers
            values = {key: v if isinstance(v, bool | int | float) else str(v) for key, v in settings.items()}
            logger.log_hyperparams(values, results, steps)
        else:
            logger.log_hyperparams({key: str(value) for key, value in settings.items()})
            logger.log_metrics(results, steps)
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("report", markdown(report), steps)
        elif hasattr(logger, "log_table"):
            header, body = rows(report)
            logger.log_table(key="report", columns=header, data=body, step=steps)
        if own:
            logger.experiment.close()
        else:
            logger.save()
            logger.finalize("success")


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
