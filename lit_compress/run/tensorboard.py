"""TensorBoard of a run: curves of all stages on one axis, a figure of every model, the final table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.analysis.pictures import site_table
from lit_compress.export.report import markdown
from lit_compress.run.folder import Run, flatten

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RunLogger(TensorBoardLogger):
    """The TensorBoard logger of one stage, in a folder of its own; its steps continue the earlier stages' steps.

    Args:
        folder: the run folder.
        stage: name of the stage, or ``report``.
        offset: optimizer steps of the earlier stages.
        purge_step: step of the run from which logged values are dropped, when a stage is continued; None for none.
    """

    def __init__(self, folder: Path, stage: str, offset: int, purge_step: int | None = None) -> None:
        super().__init__(
            save_dir=folder, name="tensorboard", version=stage, default_hp_metric=False, purge_step=purge_step
        )
        self.offset = offset

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log metrics at the step of the run; the score, which is a metric's again, is left out."""
        shown = {k: v for k, v in metrics.items() if k != "val/score"}
        super().log_metrics(shown, (step or 0) + self.offset)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the values logged so far; the pictures of the finished stage follow into the same file."""
        self.experiment.flush()

    def save(self) -> None:
        """Write no file of hyperparameters: the run's config.yaml has them."""

    @rank_zero_only
    def close(self) -> None:
        """End the file of events."""
        self.experiment.close()


def log_histograms(writer: Any, net: PreTrainedModel, step: int) -> None:
    """Log histograms of densities and ranks by role, for every kind of matrix of ``net``."""
    table = site_table(net)
    for role in dict.fromkeys(row["role"] for row in table):
        rows = [row for row in table if row["role"] == role]
        writer.add_histogram(f"density/{role}", torch.tensor([row["density"] for row in rows]), step)
        ranks = [row["rank"] for row in rows if row["rank"] is not None]
        if ranks:
            writer.add_histogram(f"rank/{role}", torch.tensor(ranks, dtype=torch.float32), step)


def settings_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by dotted name."""
    return flatten({key: report["config"].get(key) for key in ("model", "data", "seed_everything")})


def results_of(report: dict[str, Any]) -> dict[str, float]:
    """Return the main numbers of a report by name."""
    return {
        f"result/{report['metric']['name']}": report["compressed"]["metric"],
        **{f"result/{name}": report["compressed"][name] for name in ("density", "bytes", "flops")},
        "result/speedup": report["ratios"]["speedup"],
    }


def write_report(run: Run, report: dict[str, Any], steps: int) -> None:
    """Log the final table, and the settings of the run next to its results (the tab HPARAMS)."""
    logger = RunLogger(run.folder, "report", 0)
    numbers = bool | int | float  # which the tab sorts and plots
    settings = {key: v if isinstance(v, numbers) else str(v) for key, v in settings_of(report).items()}
    logger.log_hyperparams(settings, results_of(report), steps)
    logger.experiment.add_text("report", markdown(report), steps)
    logger.close()
