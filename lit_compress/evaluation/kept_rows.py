"""The bases of metrics: some keep values of every row, and compute from all rows of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_compress.evaluation.intervals import Interval, bootstrap_mean


class Score(Metric):
    """A metric of which some of the names that it computes have an interval that is drawn."""

    full_state_update = False
    higher_is_better = True

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the drawn intervals of those of its ``names`` that have one; it has seen some rows."""
        return {}


class KeptRows(Score):
    """A metric whose annotated attributes, each a ``list[Tensor]``, are its states: one tensor per batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in inspect.get_annotations(type(self)):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def keep(self, *batch: Tensor) -> None:
        """Keep the tensors of a batch, one per state, in the order of the annotations."""
        for name, value in zip(inspect.get_annotations(type(self)), batch, strict=True):
            getattr(self, name).append(value)


class RowMeans(KeptRows):
    """Means over the rows, texts or queries, each of which has scores of its own."""

    def values(self) -> dict[str, Tensor]:
        """Return the scores [rows] by name, of all ranks, on the CPU."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Return the means by name; 0 without rows."""
        means = {name: some.double().mean() if len(some) else torch.zeros(()) for name, some in self.values().items()}
        return {name: mean.float().to(self.device) for name, mean in means.items()}

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the intervals of the means."""
        return {name: bootstrap_mean(some) for name, some in self.values().items() if name in names}
