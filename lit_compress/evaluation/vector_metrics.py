"""The metric of vectors of texts, of length 1: correct over any number of batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lit_compress.evaluation.kept_rows import KeptRows


class TeacherCosine(KeptRows):
    """The mean cosine of vectors and those that a teacher gives the same texts."""

    cosines: list[Tensor]

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch: vectors [b, texts, width] and the teacher's [b, texts * width]."""
        self.keep((preds * target.view(preds.shape).to(preds)).sum(-1).mean(1).float())

    def values(self) -> Tensor:
        """Return the cosines of all rows of all ranks."""
        return dim_zero_cat(self.cosines).cpu().double() if len(self.cosines) else torch.zeros(0)

    def compute(self) -> Tensor:
        """Return their mean; 0 without any."""
        values = self.values()
        return (values.mean() if len(values) else torch.zeros(())).float().to(self.device)
