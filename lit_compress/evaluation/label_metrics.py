"""Metrics of rows with any number of labels: correct over any number of batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lit_compress.evaluation.kept_rows import KeptRows


class LabelScores(KeptRows):
    """F1 over all decisions, mean F1 of the labels that are seen, and the share of rows whose labels are all right.

    A label is seen if some row has it, or is given it. Takes decisions and labels, int [batch, labels] of 0 and 1.
    """

    predicted: list[Tensor]
    true: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch."""
        self.keep(preds.to(torch.uint8), target.to(torch.uint8))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return decisions and labels, bool [rows, labels], of all ranks, on the CPU."""
        if not len(self.predicted):
            return torch.zeros(0, 1, dtype=torch.bool), torch.zeros(0, 1, dtype=torch.bool)
        predicted, true = (dim_zero_cat(values).bool().cpu() for values in (self.predicted, self.true))
        return predicted, true

    def compute(self) -> dict[str, Tensor]:
        """Return micro_f1, macro_f1 and subset_accuracy of all batches of all ranks; 0 without rows."""
        return {name: value.float().to(self.device) for name, value in label_scores(*self.rows()).items()}


def label_scores(predicted: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Return the scores of decisions and labels, bool [rows, labels]; undefined scores are 0."""
    right = (predicted & true).sum(0).double()
    seen = predicted.sum(0) + true.sum(0)
    f1 = torch.where(seen > 0, 2 * right / seen, torch.nan)
    scores = {
        "micro_f1": 2 * right.sum() / seen.sum(),
        "macro_f1": f1.nanmean(),
        "subset_accuracy": (predicted == true).all(1).double().mean(),
    }
    return {name: torch.nan_to_num(value, nan=0.0) for name, value in scores.items()}
