"""Gradients of the loss for some matrices on a few examples, and the squares of every example's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import ExampleGradients, Pair, Statistic
from lit_compress.calibration.uses import Batch, row_parts
from lit_compress.numerics.losses import example_losses
from lit_compress.tasks import TaskType
from lit_compress.utils.errors import UserError


@dataclass(frozen=True)
class MeanGradient:
    """Of one matrix, in the model's dtype, on the CPU.

    Attributes:
        mean: [out, in], mean over the examples of their gradients.
        squares: [out, in], mean of the squares; None unless they were asked for.
    """

    mean: Tensor
    squares: Tensor | None


@dataclass(frozen=True)
class Gradients(Statistic):
    """The mean gradients, which take as much memory as the matrices; one backward for each example.

    Attributes:
        squares: whether to also return the means of every example's squares, which double the memory.
    """

    squares: bool = False
    title = "gradients"
    needs_labels = "gradients need them"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> ExampleGradients:
        """Return empty sums."""
        zeros = {name: torch.zeros_like(net.get_submodule(name).weight, device=device) for name in names}
        return ExampleGradients({name: GradientSums(total, self.squares) for name, total in zeros.items()})

    def losses(self, task: TaskType, logits: Any, rows: Batch, groups: int) -> list[Tensor]:
        """Return one loss, summed over the examples."""
        return [example_losses(logits, rows["labels"], task.loss).sum()]

    def parts(self, task: TaskType, rows: Batch) -> Iterator[Batch]:
        """Return the examples one by one."""
        return row_parts(task, rows, 1)


class GradientSums:
    """Sums of the gradients of one matrix, and of their squares.

    Args:
        total: zeros [out, in].
        squares: whether the squares are summed.
    """

    def __init__(self, total: Tensor, squares: bool) -> None:
        self.total, self.squares = total, torch.zeros_like(total) if squares else None

    def add(self, uses: Sequence[Pair]) -> None:
        """Add the gradient of every example, which is the sum over the uses."""
        for i in range(len(uses[0][0])):
            first, *others = (delta[i].mT @ x[i] for x, delta in uses)
            gradient = sum(others, start=first).to(self.total.device)
            self.total += gradient
            if self.squares is not None:
                self.squares += gradient.square_()

    def totals(self) -> list[Tensor]:
        """Return the sums."""
        return [self.total] if self.squares is None else [self.total, self.squares]

    def mean(self, name: str, count: float) -> MeanGradient:
        """Return the means over ``count`` examples of the matrix ``name``.

        Raises:
            UserError: a gradient is inf or NaN.
        """
        mean, *squares = ((total / count).cpu() for total in self.totals())
        if not mean.isfinite().all():
            raise UserError(f"calibration: gradients at '{name}' are inf or NaN; give a model with a finite loss")
        return MeanGradient(mean, squares[0] if squares else None)
