"""The metric of vectors of texts, of length 1: correct over any number of batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class TeacherCosine(Metric):
    """The mean cosine of vectors and those that a teacher gives the same texts."""

    full_state_update = False
    higher_is_better = True
    cosines: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("cosines", default=[], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch: vectors [b, texts, width] and the teacher's [b, texts * width]."""
        self.cosines.append((preds * target.view(preds.shape).to(preds)).sum(-1).mean(1).float())

    def values(self) -> Tensor:
        """Return the cosines of all rows of all ranks."""
        return dim_zero_cat(self.cosines).cpu().double() if len(self.cosines) else torch.zeros(0)

    def compute(self) -> Tensor:
        """Return their mean; 0 without any."""
        values = self.values()
        return (values.mean() if len(values) else torch.zeros(())).float().to(self.device)
