"""The loggers of a run: steps of all stages on one axis, the figure of every model, the final table.

Without an own logger a run has TensorBoard, a folder for every stage. Any logger of Lightning can replace it. A run
that continues in another process gets a new version of a CSV file, or a new run of wandb or MLflow, unless the user
names the one to continue. The steps since the last checkpoint are logged again there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.export.table import markdown
from lit_compress.models.sites import Model
from lit_compress.run.folder import CURVES, Run
from lit_compress.run.pictures import site_table, structure_figure


class Curves(TensorBoardLogger):
    """TensorBoard in a run; it writes no file of hyperparameters, which the run's config.yaml has.

    ``purge_step`` is the step of the run from which a stage that continues logs again; None if it starts.
    """

    def __init__(self, run: Run, name: str, purge_step: int | None = None) -> None:
        super().__init__(run.folder, CURVES, name, default_hp_metric=False, purge_step=purge_step)

    def save(self) -> None:
        """Write the logged values."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Write the logged values; the figure of the stage follows."""
        self.save()


def log_stage(
    loggers: Iterable[Logger], net: Model, stage: str, steps: int, scores: dict[str, float], best: int
) -> None:
    """Log the finished ``stage``: the figure of its model for TensorBoard, and its dev metrics.

    The figure is of the run's step ``steps``, the metrics are of its step ``best``.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure("structure", structure_figure(site_table(net), stage), steps)
        logger.log_metrics({f"stage/{stage}/{key}": value for key, value in scores.items()}, best)
        logger.save()


@rank_zero_only
def log_report(run: Run, report: dict[str, Any], given: Any = None) -> None:
    """Log the table of a finished run, and its settings next to its results, to its loggers; end them."""
    steps = sum(record["steps"] for record in run.finished().values())
    settings = {key: report["config"].get(key) for key in ("model", "data", "seed_everything")}
    results = {
        f"result/{report['metric']['name']}": report["compressed"]["metric"],
        **{f"result/{name}": report["compressed"][name] for name in ("density", "bytes", "flops")},
        "result/speedup": report["ratios"]["speedup"],
    }
    loggers = Curves(run, "report") if given in (None, True, False) else given
    for logger in loggers if isinstance(loggers, list | tuple) else [loggers]:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(settings, results, steps)
            logger.experiment.add_text("report", markdown(report), steps)
        else:
            logger.log_hyperparams(settings)
            logger.log_metrics(results, steps)
        logger.finalize("success")
