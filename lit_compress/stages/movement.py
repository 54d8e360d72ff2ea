"""Movement pruning: scores of parts of the matrices are trained with the weights, straight through 0/1 masks.

Victor Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, https://arxiv.org/abs/2005.07683. A unit
is a row of a matrix, a block of one, or a neuron; it has a score s and a mask m:

    W' = m * W on the unit's weights, dL/ds = sum over them of dL/dW' * W              layers/training/masked.py
    m keeps the best v(t) of all units, each counted with its weights, v cubic from 1 to the density

The masks are set once, after an optimizer step, and hold until the next one: micro-batches, ranks and validation use
the same ones. The scores start at 0 and have a learning rate of their own and no decay.

Deviation: the soft form, a threshold on sigmoid(s) and a penalty on it, is left out: its density is not known before
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_compress.layers.training.masked import BlockMaskedLinear
from lit_compress.models.sites import Model
from lit_compress.models.surgery import replace
from lit_compress.numerics.masks import keep_count, select_rows
from lit_compress.stages.unstructured import CubicSchedule, CubicStage
from lit_compress.utils.sharding import local, whole

SCORE_RATE = 1e-2  # peak learning rate of the scores; their order, which sets the masks, is the same at any


@dataclass(frozen=True)
class MaskedUnits:
    """Units of one kind: the rows or the blocks of a matrix, or the neurons of a feed-forward network.

    Attributes:
        layers: masked layers, which all have the same scores and masks: two or three matrices share their neurons.
        cost: weights of one unit, in all layers.
    """

    layers: tuple[BlockMaskedLinear, ...]
    cost: int

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.layers[0].mask)


class MovementStage(CubicStage):
    """Train weights and scores; mask units by their scores.

    A subclass puts masked layers into the model in ``begin`` and names their units in :meth:`find_units`.
    """

    settings: CubicSchedule
    decided_by_data = repeatable = True

    def find_units(self, net: Model) -> list[MaskedUnits]:
        """Return the units of the masked layers of ``net``."""
        raise NotImplementedError

    def attach(self, net: Model) -> None:
        """Find the units."""
        self.units = self.find_units(net)
        self._layers = [layer for units in self.units for layer in units.layers]
        self._costs = [units.cost for units in self.units]
        self._total = sum(units.count * units.cost for units in self.units)

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Return the group of the scores, without decay."""
        scores = [layer.score for layer in self._layers]
        return [{"params": scores, "lr": SCORE_RATE, "weight_decay": 0.0}]

    def before_step(self, net: Model) -> None:
        """Sum the gradients of scores that are one."""
        for units in self.units:
            grads = [local(layer.score.grad) for layer in units.layers if layer.score.grad is not None]
            assert len(grads) == len(units.layers)
            for grad in grads[1:]:
                grads[0].add_(grad)
            for grad in grads[1:]:
                grad.copy_(grads[0])  # equal scores with equal gradients stay equal

    @torch.no_grad()
    def after_step(self, net: Model, step: int) -> None:
        """Set the masks, which hold until the next optimizer step."""
        scores = [whole(units.layers[0].score.detach()) for units in self.units]
        masks = self.best(scores, keep_count(self.target(step), self._total))
        for units, mask in zip(self.units, masks, strict=True):
            for layer in units.layers:
                layer.mask.copy_(mask)

    def best(self, scores: Sequence[Tensor], budget: int) -> list[Tensor]:
        """Return the masks of the units with the largest scores, whose weights are at most ``budget``."""
        return select_rows(scores, self._costs, budget)

    def achieved(self) -> float:
        """Return the share of the sites' weights that is not masked."""
        counts = torch.stack([units.layers[0].mask.sum() for units in self.units]).tolist()
        return sum(count * units.cost for count, units in zip(counts, self.units, strict=True)) / self._total

    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log the density, and its target."""
        return {"target": self.target(step), "density": self.achieved()}

    def deploy(self, net: Model) -> None:
        """Replace the masked layers by Linears whose masked weights are zero."""
        for name, module in list(net.named_modules()):
            if isinstance(module, BlockMaskedLinear):
                replace(net, name, module.zeroed())
