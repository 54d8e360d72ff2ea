"""The base of metrics that keep values of every row, and compute from all rows of all ranks."""

from __future__ import annotations

import inspect

from torch import Tensor
from torchmetrics import Metric


class KeptRows(Metric):
    """A metric whose annotated attributes, each a ``list[Tensor]``, are its states: one tensor per batch."""

    full_state_update = False
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        for name in inspect.get_annotations(type(self)):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def keep(self, *batch: Tensor) -> None:
        """Keep the tensors of a batch, one per state, in the order of the annotations."""
        for name, value in zip(inspect.get_annotations(type(self)), batch, strict=True):
            getattr(self, name).append(value)
