"""TensorBoard of a run: curves of all stages on one axis, figures of every model, the final table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.analysis.pictures import _CUT, mask_figure, site_table, structure_figure, units_figure
from lit_compress.analysis.widths import component_figure, is_narrow, width_figure, width_table
from lit_compress.export.report import markdown
from lit_compress.models.architectures import get_architecture
from lit_compress.models.storage import COMPONENTS
from lit_compress.models.surgery import describe
from lit_compress.run.folder import Run, flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure
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


Pictures = dict[str, "Figure"]  # name -> figure


def pictures(net: PreTrainedModel, folder: Path, stage: str) -> Pictures:
    """Return the figures of a finished stage's model: its structure, and masks, units or widths that are left.

    Args:
        net: of the stage.
        folder: of the model; principal components of SP3 may be next to it.
        stage: its name.
    """
    figures = {"structure": structure_figure(net, stage)}
    if is_narrow(net):
        figures["widths"] = width_figure({stage: width_table(net)})
        if (folder / COMPONENTS).is_file():
            from safetensors.torch import load_file

            shares = load_file(folder / COMPONENTS)["shares"]
            figures["components"] = component_figure(shares, "principal components by site")
        return figures
    table, removable = site_table(net), get_architecture(net).has_removable_sublayers
    if removable and {spec["kind"] for spec in describe(net).values()} & _CUT:
        figures["units"] = units_figure(net, stage)
    elif all(row["rank"] is None for row in table) and any(row["density"] < 0.999 for row in table):
        figures["mask"] = mask_figure(net, stage)
    return figures


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
