"""Gradients of single examples at Linears: their mean, and their squares summed over the outputs.

The last are the empirical Fisher information, exact, in the time of about one training step.

Hsu et al. 2022, "Language Model Compression with Weighted Low-Rank Factorization", Eq. 3, per example d_i:

    I_w = 1/|D| sum_i (dL(d_i; w) / dw)^2

Example s gives a Linear the inputs X_s [tokens, in] and, at its outputs, the gradients D_s [tokens, out]. One backward
pass for the whole batch computes them, without a gradient of any weight. The example's gradient of the weight is
G_s = D_s^T X_s [out, in]; with few tokens, the sum of its squares is cheaper without forming it:

    sum_o G[o, j]^2 = sum_t X[t, j] (K X)[t, j],   K = D D^T [tokens, tokens]

The gradient of a matrix that is used several times in a forward is the sum over its uses, squared afterwards: the uses
are concatenated on the token axis. Vectors have no labels; a target is drawn around each (sampled_labels.py, N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lit_compress.calibration.statistics import Batch, Collector, Statistic
from lit_compress.numerics.ranks import break_even_rank
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import place_of_sums
from lit_compress.utils.errors import UserError

Pair = tuple[Tensor, Tensor]  # inputs [groups, tokens, in] and gradients [groups, tokens, out] of one use of a Linear
_CHUNK, _CHUNK_CPU = 1 << 26, 1 << 20  # most elements of a temporary tensor; on a CPU, those that fit a core's cache


class ExampleGradients(Collector):
    """Adds the gradients of every example to the sums of each matrix, once all its uses in a pass are known.

    That frees their memory early.
    """

    by_token = False

    def __init__(self, sums: Mapping[str, GradientSum]) -> None:
        self.sums = dict(sums)
        self.uses: dict[str, list[Pair]] = {name: [] for name in sums}
        self.missing = dict.fromkeys(sums, 0)

    def use(self, name: str, x: Tensor, output: Tensor, where: Tensor | None, rows: int) -> None:
        """Keep the inputs until the gradient comes."""
        read = [x.detach().reshape(rows, -1, x.shape[-1])]
        self.missing[name] += 1

        def on_gradient(gradient: Tensor) -> None:
            self.uses[name].append((read.pop(), gradient.reshape(rows, -1, gradient.shape[-1])))
            self.missing[name] -= 1
            if not self.missing[name]:
                self._add(name)

        output.requires_grad_().register_hook(on_gradient)

    def end(self) -> None:
        """Add gradients that still wait for another use, which had no influence on the loss."""
        for name in self.sums:
            self._add(name)

    def _add(self, name: str) -> None:
        uses, self.uses[name], self.missing[name] = self.uses[name], [], 0
        if uses:
            self.sums[name].add(uses)

    def totals(self) -> list[Tensor]:
        """Return the sums of all matrices."""
        return [sums.total for sums in self.sums.values()]

    def result(self) -> dict[str, Tensor]:
        """Return the means over the examples."""
        for name, sums in self.sums.items():
            if not sums.total.isfinite().all():
                raise UserError(f"calibration: gradients at '{name}' are inf or NaN; give a model with a finite loss")
        every, self.sums = self.sums, {}
        return {name: every.pop(name).mean(float(self.examples)) for name in list(every)}


@dataclass
class GradientSum:
    """The sum over examples of the gradients of one matrix, into ``total`` [out, in] of zeros."""

    total: Tensor

    def add(self, uses: Sequence[Pair]) -> None:
        """Add the gradients of all examples, which are sums over the uses."""
        for x, delta in uses:
            self.total += (delta.flatten(0, 1).mT @ x.flatten(0, 1)).to(self.total.device)

    def mean(self, count: float) -> Tensor:
        """Return the mean over ``count`` examples, on the CPU."""
        return (self.total / count).cpu()


@dataclass
class Fisher(GradientSum):
    """The sum over examples of the squared gradients G [out, in] of one matrix.

    Attributes:
        total: float64 [in], sum over the rows of G ** 2; the weights of FWSVD.
        outputs: number of rows.
    """

    outputs: int

    def add(self, uses: Sequence[Pair]) -> None:
        """Add the squares of every example's gradient, which is the sum over the uses."""
        shape, examples, tokens = (self.outputs, len(self.total)), len(uses[0][0]), sum(x.shape[1] for x, _ in uses)
        gram = tokens < break_even_rank(*shape)
        size = tokens * (tokens + max(shape)) if gram else prod(shape)
        step = max(1, (_CHUNK_CPU if uses[0][0].device.type == "cpu" else _CHUNK) // size)
        for start in range(0, examples, step):
            x, delta = (_joined([pair[side][start : start + step] for pair in uses]) for side in (0, 1))
            squares = (delta @ delta.mT @ x).mul_(x).sum((0, 1)) if gram else (delta.mT @ x).square_().sum(0).sum(0)
            self.total += squares.to(self.total.device)  # the CPU if the device has no float64

    def mean(self, count: float) -> Tensor:
        """Return the mean of each column, the importance that numerics/decompose.py takes."""
        return super().mean(count).clamp_min(0) / self.outputs  # the Gram form may round a zero to something negative


@dataclass(frozen=True)
class DiagonalFisher(Statistic):
    """The Fisher information (Eq. 3), under the true labels; of vectors under drawn ones, with seed 0."""

    title = "Fisher information"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> ExampleGradients:
        """Return empty sums."""
        zeros = partial(torch.zeros, dtype=torch.float64, device=place_of_sums(device))
        shapes = {name: net.get_submodule(name).weight.shape for name in names}
        return ExampleGradients({name: Fisher(zeros(inputs), outputs) for name, (outputs, inputs) in shapes.items()})

    def parts(self, task: TaskType, rows: Batch) -> Iterable[Batch]:
        """Return the whole batch; of a language model parts of it."""
        return super().parts(task, rows) if task.over_vocabulary else [rows]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class Gradients(Statistic):
    """The mean gradients [out, in] of the examples, as large as the matrices."""

    title = "gradients"

    def collector(self, net: Any, names: Sequence[str], device: torch.device | str) -> ExampleGradients:
        """Return empty sums."""
        zeros = {name: torch.zeros_like(net.get_submodule(name).weight, device=device) for name in names}
        return ExampleGradients({name: GradientSum(total) for name, total in zeros.items()})
