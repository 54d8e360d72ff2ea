"""Training with weights that are rounded to 4 bits, for programs of such integers (Jacob et al. 2018, 1712.05877).

    forward and backward   at Q(W), W rounded to its grid (numerics/rounding.py); W gets the gradient of Q(W)
    step                   W <- W - step(gradient)

The straight-through estimator (Bengio et al. 2013, arXiv 1308.3432) on the matrices of the blocks. The best model has
Q(W), which the export stores without another loss. The paper has 8 bits, and activations too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_compress.models.sites import Model, blocks
from lit_compress.numerics.rounding import rounded
from lit_compress.stages.compression import CompressedStage
from lit_compress.stages.micro_batches import MicroBatches

GROUP = 32  # weights that share a scale, as in a program


def is_rounded(net: Model, partly: bool = False) -> bool:
    """Return whether all matrices of the blocks are rounded; one that cannot be is not, or does not count if partly.

    A matrix that is mostly zeros is pruned: a group with one other value is its own rounding.
    """
    values = [value.detach() for value in _matrices(net) if _fits(value) or not partly]
    full = all(_fits(v) and 2 * v.count_nonzero() > v.numel() for v in values)
    return bool(values) and full and all(torch.equal(rounded(v, GROUP), v) for v in values)


def _matrices(net: Model) -> list[nn.Parameter]:
    """Return the matrices of the blocks, each once."""
    values = {id(value): value for *_, block in blocks(net) for value in block.parameters() if value.ndim == 2}
    return list(values.values())


def _fits(value: Tensor) -> bool:
    return value.shape[1] % GROUP == 0


class RoundedStage(CompressedStage):
    """A stage whose model has rounded matrices in its blocks whenever it is run, and exact ones in a step.

    Matrices whose rows are no multiple of :data:`GROUP` stay as they are.
    """

    _exact: Sequence[tuple[nn.Parameter, Tensor]] = ()  # while they are rounded

    def round(self, net: Model) -> None:
        """Round the matrices, from their exact values if they are rounded."""
        self.unround()
        self._exact = [(value, value.data) for value in _matrices(net) if _fits(value)]
        with torch.no_grad():
            for value, exact in self._exact:
                value.data = rounded(exact, GROUP)

    def unround(self) -> None:
        """Give the matrices their exact values."""
        for value, exact in self._exact:
            value.data = exact
        self._exact = ()

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss terms of the rounded model."""
        if not self._exact:
            self.round(method.net)
        return super().losses(method, batch)

    def before_step(self, net: Model) -> None:
        """Let the optimizer change the exact values."""
        self.unround()
        super().before_step(net)

    def before_validation(self, net: Model, step: int) -> None:
        """Validate, and keep, the rounded model."""
        super().before_validation(net, step)
        self.round(net)

    def keep_untrained(self, net: Model) -> None:
        """Keep the exact model: an export has better ways to round it."""
        self.unround()
