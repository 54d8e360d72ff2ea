"""Movement pruning: scores of parts of the matrices are trained with the weights, straight through 0/1 masks.

Victor Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, https://arxiv.org/abs/2005.07683. A unit
is a row of a matrix, a block of one, or a neuron; it has a score s and a mask m:

    W' = m * W on the unit's weights, m = binarise(s), dL/ds = sum over them of dL/dW' * W     layers/training/masked.py
    hard    m keeps the best v(t) of all units, each counted with its weights, v cubic from 1 to the density
    soft    m = [sigmoid(s) > tau(t)], tau = tau_f (1 - r^3) with the cubic's r(t), from 0 to tau_f
            L += lambda(t) mean over {attention, feed-forward} of mean over groups of units of mean_i sigmoid(s_i),
            lambda(t) = lambda_f tau(t) / tau_f

The masks are set once, after an optimizer step, and hold until the next one: micro-batches, ranks and validation use
the same ones. The scores start at 0 and have a learning rate of their own and no decay. The penalty enters as its
gradient, added to the whole gradient of the scores before clipping: once per optimizer step, the same on shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_compress.layers import BlockMaskedLinear
from lit_compress.models.sites import Model
from lit_compress.models.surgery import replace
from lit_compress.numerics.masks import keep_count, rows_above, select_rows
from lit_compress.stages.base import Limits
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.unstructured import CubicSchedule, CubicStage
from lit_compress.utils.sharding import local, whole


@dataclass(frozen=True)
class MovementTraining(CubicSchedule):
    """How scores are trained and masks are set.

    Args:
        form: ``hard`` keeps the units with the largest scores up to the density, ``soft`` those whose sigmoid(score) is
            above a threshold.
        score_learning_rate: peak learning rate of the scores.
        threshold: final threshold tau_f (``soft``).
        penalty: final weight lambda_f of the scores' sigmoids in the loss (``soft``).
    """

    form: Literal["hard", "soft"] = "hard"
    score_learning_rate: float = 1e-2
    threshold: float = 0.1
    penalty: float = 10.0
    matters: ClassVar[dict[str, Any]] = {key: {"form": ("soft",)} for key in ("threshold", "penalty")}
    limits: ClassVar[Limits] = {
        "prune.score_learning_rate": {"above": 0, "hint": "usual: 1e-2"}, "prune.penalty": {"low": 0},
        "prune.threshold": {"above": 0, "below": 1, "hint": "usual: 0.1"},
    }  # fmt: skip


@dataclass(frozen=True)
class MaskedUnits:
    """Units of one kind: the rows or the blocks of a matrix, or the neurons of a feed-forward network.

    Attributes:
        layers: masked layers, which all have the same scores and masks: two or three matrices share their neurons.
        cost: weights of one unit, in all layers.
        feed_forward: whether the layers belong to a feed-forward network.
    """

    layers: tuple[BlockMaskedLinear, ...]
    cost: int
    feed_forward: bool

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.layers[0].mask)


class MovementStage(CubicStage):
    """Train weights and scores; mask units by their scores.

    A subclass puts masked layers into the model in ``begin`` and names their units in :meth:`find_units`.
    """

    settings: MovementTraining
    decided_by_data = True

    def find_units(self, net: Model) -> list[MaskedUnits]:
        """Return the units of the masked layers of ``net``."""
        raise NotImplementedError

    def attach(self, net: Model) -> None:
        """Find the units, and each kind's share of the penalty, a mean over attention and feed-forward means."""
        self.units = self.find_units(net)
        self._layers = [layer for units in self.units for layer in units.layers]
        self._costs = [units.cost for units in self.units]
        self._total = sum(units.count * units.cost for units in self.units)
        groups = [units.feed_forward for units in self.units]
        self._shares = [1 / (len(set(groups)) * groups.count(group)) for group in groups]

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Return the group of the scores, with their learning rate."""
        scores = [layer.score for layer in self._layers]
        return [{"params": scores, "lr": self.settings.score_learning_rate, "weight_decay": 0.0}]

    def progress(self, step: int) -> float:
        """Return tau(step) / tau_f, from 0 to 1."""
        return (1 - self.target(step)) / (1 - self.density)

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute lambda(t) for :meth:`before_step`; return the usual loss terms."""
        self._penalty = self.settings.penalty * self.progress(method.trainer.global_step)
        return super().losses(method, batch)

    def before_step(self, net: Model) -> None:
        """Sum the gradients of scores that are one, and add the penalty's: lambda * share / units * sigmoid'(s)."""
        for units, share in zip(self.units, self._shares, strict=True):
            grads = [local(layer.score.grad) for layer in units.layers if layer.score.grad is not None]
            assert len(grads) == len(units.layers)
            for grad in grads[1:]:
                grads[0].add_(grad)
            if self.settings.form == "soft":
                p = local(units.layers[0].score).detach().sigmoid()
                grads[0].add_(p * (1 - p), alpha=self._penalty * share / units.count)
            for grad in grads[1:]:
                grad.copy_(grads[0])  # equal scores with equal gradients stay equal

    @torch.no_grad()
    def after_step(self, net: Model, step: int) -> None:
        """Set the masks, which hold until the next optimizer step."""
        scores = [whole(units.layers[0].score.detach()) for units in self.units]
        if self.settings.form == "hard":
            masks = self.best(scores, keep_count(self.target(step), self._total))
        else:
            threshold = self.settings.threshold * self.progress(step)
            masks = [rows_above(score, threshold, int(0.005 * len(score)) + 1) for score in scores]
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
        """Log the density, and its target (``hard``) or the threshold (``soft``)."""
        if self.settings.form == "hard":
            return {"target": self.target(step), "density": self.achieved()}
        return {"threshold": self.settings.threshold * self.progress(step), "density": self.achieved()}

    def deploy(self, net: Model) -> None:
        """Replace the masked layers by Linears whose masked weights are zero."""
        for name, module in list(net.named_modules()):
            if isinstance(module, BlockMaskedLinear):
                replace(net, name, module.zeroed())

    def finish(self, net: Model, folder: Path) -> None:
        """Warn if the soft form has missed the density."""
        if self.achieved() > self.density:
            rank_zero_warn(
                f"prune.penalty: {self.settings.penalty} left {self.achieved():.3f} of the weights, more than "
                f"model.density {self.density}; raise it, or use prune.form hard"
            )
