"""Empirical Fisher information of Linears, summed over rows or columns: exact, in the time of about one training step.

Hsu et al. 2022, "Language Model Compression with Weighted Low-Rank Factorization", Eq. 3, per example d_i:

    I_w = 1/|D| sum_i (dL(d_i; w) / dw)^2

Example s gives a Linear the inputs X_s [tokens, in] and, at its outputs, the gradients D_s [tokens, out]. One backward
pass for the whole batch computes them, without a gradient of any weight. The example's gradient of the weight is
G_s = D_s^T X_s [out, in]; with few tokens, the sums of its squares are cheaper without forming it:

    sum_o G[o, j]^2 = sum_t X[t, j] (K X)[t, j],   K = D D^T [tokens, tokens]
    sum_j G[o, j]^2 = sum_t D[t, o] (H D)[t, o],   H = X X^T [tokens, tokens]

The gradient of a matrix that is used several times in a forward is the sum over its uses, squared afterwards: the uses
are concatenated on the token axis. Vectors have no labels; a target is drawn around each (sampled_labels.py, N).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_compress.calibration.statistics import ExampleGradients, Pair, Statistic
from lit_compress.calibration.uses import Batch
from lit_compress.numerics.decompose import Axis, Importance
from lit_compress.numerics.losses import example_losses
from lit_compress.numerics.ranks import break_even_rank
from lit_compress.numerics.sampled_labels import fisher_losses
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import place_of_sums
from lit_compress.utils.errors import UserError

Estimator = Literal["per_example", "batch"]
_CHUNK, _CHUNK_CPU = 1 << 26, 1 << 20  # most elements of a temporary tensor; on a CPU, those that fit a core's cache


@dataclass(frozen=True)
class Fisher:
    """Mean over the examples of the squared gradient G [out, in] of one matrix. Float64, on the CPU.

    Attributes:
        rows: [out], sum over the columns of G ** 2.
        columns: [in], sum over the rows of G ** 2; the weights of FWSVD.
    """

    rows: Tensor
    columns: Tensor

    def importance(self, axis: Axis) -> Importance:
        """Return the importance for ``axis``, as :func:`lit_compress.numerics.decompose.decompose` takes it.

        Spread over the elements, the importance of every axis has the same sum, so that weighted singular values of
        several matrices are on one scale (ranks.py).
        """
        (out,), (inner,) = self.rows.shape, self.columns.shape
        match axis:
            case "in":
                return self.columns / out
            case "out":
                return self.rows / inner
            case "both":  # of independent rows and columns: F_ij = rows_i * columns_j / sum
                return self.rows, self.columns / self.columns.sum().clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class DiagonalFisher(Statistic):
    """The Fisher information, under the true labels; of vectors under drawn ones, with seed 0.

    Attributes:
        estimator: ``per_example`` squares each example's gradient (Eq. 3). ``batch`` squares the mean gradient of each
            batch and averages over batches, as re-implementations do: mu^2 + var / batch instead of mu^2 + var.
    """

    estimator: Estimator = "per_example"
    title = "Fisher information"
    needs_labels = "the Fisher information needs them"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> ExampleGradients:
        """Return empty sums."""
        place = place_of_sums(device)
        shapes = [net.get_submodule(name).weight.shape for name in names]
        return ExampleGradients({n: Squares.empty(s, place) for n, s in zip(names, shapes, strict=True)})

    def losses(self, task: TaskType, logits: Any, rows: Batch, groups: int) -> list[Tensor]:
        """Return one loss, the mean over the examples of each group, summed."""
        if task.loss == "vectors":
            (total,) = fisher_losses(logits, task.loss, "drawn", index=rows["index"])
        else:
            total = example_losses(logits, rows["labels"], task.loss).sum()
        return [total * (groups / len(logits))]

    def parts(self, task: TaskType, rows: Batch) -> Iterable[Batch]:
        """Return the whole batch; of a language model parts of it."""
        long = task.over_vocabulary and self.estimator == "per_example"
        return super().parts(task, rows) if long else [rows]

    def groups(self, rows: Batch) -> int:
        """Return the number of gradients to square."""
        return len(rows["index"]) if self.estimator == "per_example" else 1


class Squares:
    """Sums of squared gradients of one matrix.

    Args:
        part: zeros [out + in], where the sums by rows and by columns are kept.
        shape: of the matrix.
    """

    def __init__(self, part: Tensor, shape: torch.Size) -> None:
        self.shape = shape
        self.rows, self.columns = part.split(list(shape))

    @classmethod
    def empty(cls, shape: torch.Size, device: torch.device | str) -> Squares:
        """Return empty sums of a matrix of this shape."""
        return cls(torch.zeros(sum(shape), dtype=torch.float64, device=device), shape)

    def totals(self) -> list[Tensor]:
        """Return the sums."""
        return [self.rows, self.columns]

    def add(self, uses: Sequence[Pair]) -> None:
        """Add the squares of every group's gradient, which is the sum over the uses."""
        groups, tokens = uses[0][0].shape[0], sum(x.shape[1] for x, _ in uses)
        gram = tokens < break_even_rank(*self.shape)
        size = tokens * (tokens + max(self.shape)) if gram else self.shape.numel()
        step = max(1, (_CHUNK_CPU if uses[0][0].device.type == "cpu" else _CHUNK) // size)
        for start in range(0, groups, step):
            x, delta = (_joined([pair[side][start : start + step] for pair in uses]) for side in (0, 1))
            if gram:
                _add(self.columns, ((delta @ delta.mT) @ x).mul_(x).sum((0, 1)))
                _add(self.rows, ((x @ x.mT) @ delta).mul_(delta).sum((0, 1)))
                continue
            squares = (delta.mT @ x).square_().sum(0)
            _add(self.rows, squares.sum(1))
            _add(self.columns, squares.sum(0))

    def mean(self, name: str, count: float) -> Fisher:
        """Divide by the number of groups."""
        # the Gram form may round a zero to something negative
        rows, columns = ((total / count).clamp_min(0).cpu() for total in (self.rows, self.columns))
        if not (rows.isfinite().all() and columns.isfinite().all()):
            raise UserError(f"fisher: gradients at '{name}' are inf or NaN; use a model whose loss is finite here")
        return Fisher(rows, columns)


def _add(total: Tensor, part: Tensor) -> None:
    """Add ``part`` to ``total``, which is on the CPU if the device has no float64."""
    total += part.to(total.device)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
