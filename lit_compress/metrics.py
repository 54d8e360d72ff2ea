"""The scores of a task, by name, as torchmetrics: right over any number of batches and of ranks.

A score that is not defined (nothing seen, constant predictions or labels) is 0.0, never NaN: NaN would
win or lose every comparison of epochs by accident.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassMatthewsCorrCoef
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from torchmetrics.utilities import dim_zero_cat

from lit_compress.errors import UserError, nearest
from lit_compress.tasks import Task


class F1(BinaryF1Score):
    """F1 of class 1 of two; takes logits [batch, 2] and labels [batch]."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count one batch."""
        super().update(preds.argmax(dim=-1), target)


class Matthews(MulticlassMatthewsCorrCoef):
    """Matthews correlation as scikit-learn defines it; takes logits [batch, classes] and labels [batch].

    torchmetrics gives +-1 where predictions and labels are constant; that is undefined and scored 0.0.
    """

    def compute(self) -> Tensor:
        """Return the score of all batches of all ranks."""
        constant = ((self.confmat > 0).any(dim=0).sum() < 2) | ((self.confmat > 0).any(dim=1).sum() < 2)
        return torch.zeros((), device=self.confmat.device) if constant else super().compute()


class Correlation(Metric):
    """The mean of correlation coefficients; takes predictions [batch] or [batch, 1] and labels [batch].

    Keeps all values, as ranks (Spearman) cannot be had from running sums.
    """

    full_state_update = False
    higher_is_better = True
    predictions: list[Tensor]
    labels: list[Tensor]

    def __init__(self, *coefficients: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.coefficients = coefficients
        self.add_state("predictions", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Keep one batch."""
        self.predictions.append(preds.detach().reshape(-1).float())
        self.labels.append(target.reshape(-1).float())

    def compute(self) -> Tensor:
        """Return the score of all batches of all ranks."""
        if not len(self.predictions):
            return torch.zeros((), device=self.device)
        predictions, labels = dim_zero_cat(self.predictions), dim_zero_cat(self.labels)
        if not len(labels) or predictions.min() == predictions.max() or labels.min() == labels.max():
            return torch.zeros((), device=labels.device)
        # float64 on the CPU (not every accelerator has it): predictions may differ in the last digits only
        values = [score(predictions.double().cpu(), labels.double().cpu()) for score in self.coefficients]
        return torch.nan_to_num(torch.stack(values).mean(), nan=0.0).float().to(labels.device)


METRICS: dict[str, Callable[[Task], Metric]] = {
    "accuracy": lambda task: MulticlassAccuracy(task.num_labels, average="micro"),
    "f1": lambda task: F1(),
    "matthews": lambda task: Matthews(task.num_labels),
    "pearson": lambda task: Correlation(pearson_corrcoef),
    "spearman": lambda task: Correlation(spearman_corrcoef),
    "pearson_spearman": lambda task: Correlation(pearson_corrcoef, spearman_corrcoef),
}


def build_metrics(task: Task, prefix: str = "") -> MetricCollection:
    """Return the metrics of ``task``; keys are ``prefix`` + the metric's name.

    The collection takes logits [batch, num_labels] (or predictions [batch] for regression) and labels
    [batch].

    Raises:
        UserError: the task's record names a metric that does not exist.
    """
    for name in task.metrics:
        if name not in METRICS:
            raise UserError(f"task '{task.name}': unknown metric '{name}'; {nearest(name, METRICS)}")
    # No groups of shared states: they are found by comparing values, and lists may be equal by accident.
    return MetricCollection({name: METRICS[name](task) for name in task.metrics}, prefix=prefix, compute_groups=False)
