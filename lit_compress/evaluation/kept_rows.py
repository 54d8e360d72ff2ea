"""The bases of metrics: some keep values of every row, and compute from all rows of all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_compress.evaluation.intervals import Interval, bootstrap


class Score(Metric):
    """A metric of which some of the names that it computes have an interval that is drawn."""

    full_state_update = False
    higher_is_better = True

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the drawn intervals of its scores, those called ``names`` at least, if they have one."""
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

    def kept(self) -> list[Tensor]:
        """Return the states of all ranks, [rows, ...] each, on the CPU; [] without rows."""
        states = [getattr(self, name) for name in inspect.get_annotations(type(self))]
        return [dim_zero_cat(state).cpu() for state in states] if len(states[0]) else []


class RowScores(KeptRows):
    """Scores of values that every row has, which all have intervals; ``names`` are theirs."""

    names: Sequence[str]

    def values(self) -> list[Tensor]:
        """Return the values [rows, ...] of all ranks, on the CPU; [] without rows."""
        return self.kept()

    def scores(self, *values: Tensor) -> dict[str, Tensor]:
        """Return the scores of some rows by name: the means of values [rows, names], if nothing else is said."""
        return dict(zip(self.names, values[0].double().mean(0), strict=True))

    def compute(self) -> dict[str, Tensor]:
        """Return the scores of all rows by name; 0 without rows."""
        values = self.values()
        scores = self.scores(*values) if values else dict.fromkeys(self.names, torch.zeros(()))
        return {name: score.float().to(self.device) for name, score in scores.items()}

    def intervals(self, names: Collection[str]) -> dict[str, Interval]:
        """Return the intervals of all scores, of other rows than these."""
        values = self.values()
        return bootstrap(lambda rows: self.scores(*(some[rows] for some in values)), len(values[0])) if values else {}
