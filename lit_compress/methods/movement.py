"""Movement pruning of neurons: the baseline "Movement" of LoSparse's tables.

Victor Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, https://arxiv.org/abs/2005.07683;
whole rows as in Lagunas et al., "Block Pruning For Faster Transformers", 2021, https://arxiv.org/abs/2109.04838, and
its program nn_pruning (a block is one output row of torch's weight [out, in]). LoSparse says of its baseline: "a
trainable mask to each neuron [...] When the mask is smaller than a threshold, the corresponding neuron is pruned".

    W' = m[:, None] * W, b' = m * b, m = binarise(s), dL/ds = dL/dm               layers/training/masked.py
    hard    m keeps the best v(t) of all rows, v cubic from 1 to the density
    soft    m = [sigmoid(s) > tau(t)], tau = tau_f (1 - r^3) with the cubic's r(t), from 0 to tau_f
            L += lambda(t) mean over {attention, feed-forward} of mean over matrices of mean_i sigmoid(s_i),
            lambda(t) = lambda_f tau(t) / tau_f

Choices:
    - Rows of all matrices are ranked together, each counted with its parameters, so that the density is met (nn_pruning
      ranks every matrix by itself). LoSparse does not say which form it ran; hard is the default, as its ratios are
      exact.
    - The masks are set once, after an optimizer step, and hold until the next one: micro-batches, ranks and
      validation use the same ones. nn_pruning evaluates with the final threshold, we with the present one.
    - The scores start at 0 and have a learning rate of their own and no decay.
    - The penalty enters as its gradient, added to the whole gradient of the scores before clipping: once per optimizer
      step, the same on shards.
    - soft always keeps int(0.005 out) + 1 rows of a matrix, as nn_pruning does. Its density follows from
      ``penalty``: the run warns when it ends above the one asked for.
    - No distillation unless asked for (nn_pruning: 0.9, temperature 2).

The export computes the same as the pruned net in evaluation mode: removed rows are not stored, and a neuron or a head
whose rows are all removed is removed with the columns that read it, as in ITP (models/slicing.py). ``density`` counts
kept rows; the export may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_compress.layers import MaskedLinear
from lit_compress.methods.base import Distillation, Method
from lit_compress.models.outline import keep_rows_evenly
from lit_compress.models.record import FEED_FORWARD
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import Structure, replace
from lit_compress.numerics.masks import keep_count, rows_above, select_rows
from lit_compress.stages.base import Stage, StageContext
from lit_compress.stages.unstructured import CubicSchedule, CubicStage
from lit_compress.utils.errors import require
from lit_compress.utils.sharding import local, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MovementSettings(CubicSchedule):
    """How rows are masked.

    Args:
        form: ``hard`` keeps the rows with the largest scores up to the density, ``soft`` those whose sigmoid(score) is
            above a threshold.
        score_learning_rate: peak learning rate of the scores.
        threshold: final threshold tau_f (``soft``).
        penalty: final weight lambda_f of the scores' sigmoids in the loss (``soft``).
    """

    form: Literal["hard", "soft"] = "hard"
    score_learning_rate: float = 1e-2
    threshold: float = 0.1
    penalty: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prune.score_learning_rate", above=0, hint="usual: 1e-2")
        require(self, "prune.threshold", above=0, below=1, hint="usual: 0.1")
        require(self, "prune.penalty", low=0)


class MovementPruning(CubicStage):
    """Train weights and row scores; mask rows by their scores.

    Args:
        settings: schedule, masks and training.
        density: final kept fraction of the sites' weights.
    """

    settings: MovementSettings
    decided_by_data = True

    def build(self, method: StageContext, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Load the net and put a masked layer at every site."""
        net = super().build(method, previous, structure)
        for site in find_sites(net):
            replace(net, site.name, MaskedLinear(net.get_submodule(site.name)))  # type: ignore[arg-type]
        return net

    def outline(self, net: PreTrainedModel) -> PreTrainedModel:
        """Return ``net`` with some rows of every matrix; which rows is decided by training."""
        total = sum(net.get_submodule(site.name).weight.numel() for site in find_sites(net))  # type: ignore
        return net if self.density == 1 else keep_rows_evenly(net, {}, keep_count(self.density, total))

    def attach(self, net: PreTrainedModel) -> None:
        """Find the masked layers, and each one's share of the penalty, a mean over attention and feed-forward means."""
        sites = find_sites(net)
        self._layers: list[MaskedLinear] = [net.get_submodule(site.name) for site in sites]  # type: ignore[misc]
        self._costs = [layer.in_features for layer in self._layers]
        self._total = sum(layer.out_features * layer.in_features for layer in self._layers)
        groups = [site.role in FEED_FORWARD for site in sites]
        self._shares = [1 / (len(set(groups)) * groups.count(group)) for group in groups]

    def param_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """Return the group of the scores, with their learning rate."""
        scores = [layer.score for layer in self._layers]
        return [{"params": scores, "lr": self.settings.score_learning_rate, "weight_decay": 0.0}]

    def progress(self, step: int) -> float:
        """Return tau(step) / tau_f, from 0 to 1."""
        return (1 - self.target(step)) / (1 - self.density) if self.density < 1 else 0.0

    def losses(self, method: StageContext, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute lambda(t) for :meth:`before_step`; return the usual loss terms."""
        self._penalty = self.settings.penalty * self.progress(method.trainer.global_step)
        return super().losses(method, batch)

    def before_step(self, net: PreTrainedModel) -> None:
        """Add the penalty's gradient: lambda * share / out * sigmoid'(s)."""
        if self.settings.form == "hard":
            return
        for layer, share in zip(self._layers, self._shares, strict=True):
            assert layer.score.grad is not None
            p = local(layer.score).detach().sigmoid()
            local(layer.score.grad).add_(p * (1 - p), alpha=self._penalty * share / layer.out_features)

    @torch.no_grad()
    def after_step(self, net: PreTrainedModel, step: int) -> None:
        """Set the masks, which hold until the next optimizer step."""
        if self.density == 1:
            return
        scores = [whole(layer.score.detach()) for layer in self._layers]
        if self.settings.form == "hard":
            masks = select_rows(scores, self._costs, keep_count(self.target(step), self._total))
        else:
            threshold = self.settings.threshold * self.progress(step)
            masks = [rows_above(score, threshold, int(0.005 * len(score)) + 1) for score in scores]
        for layer, mask in zip(self._layers, masks, strict=True):
            layer.mask.copy_(mask)

    def achieved(self) -> float:
        """Return the share of the sites' weights that is not masked."""
        kept = sum(int(layer.mask.sum()) * cost for layer, cost in zip(self._layers, self._costs, strict=True))
        return kept / self._total

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Log the density, and its target (``hard``) or the threshold (``soft``)."""
        if self.settings.form == "hard":
            return {"target": self.target(step), "density": self.achieved()}
        return {"threshold": self.settings.threshold * self.progress(step), "density": self.achieved()}

    def deploy(self, net: PreTrainedModel) -> None:
        """Replace the masked layers by Linears whose masked rows are zero."""
        for site in find_sites(net):
            layer = net.get_submodule(site.name)
            if isinstance(layer, MaskedLinear):
                replace(net, site.name, layer.zeroed())

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Warn if the soft form has missed the density."""
        if self.achieved() > self.density:
            rank_zero_warn(
                f"prune.penalty: {self.settings.penalty} left {self.achieved():.3f} of the weights, more than "
                f"model.density {self.density}; raise it, or use prune.form hard"
            )


class Movement(Method):
    """Prune neurons by scores that are trained with the weights.

    Args:
        density: kept fraction of the weights of the transformer blocks' matrices, in (0, 1]; default 0.2.
        prune: schedule and masks of the pruning, and its training.
        distillation: weights of the loss terms with the dense net as teacher; off (alpha 0) by default.
    """

    usual_density = 0.2

    def __init__(
        self,
        *,
        density: float | None = None,
        prune: MovementSettings = MovementSettings(),
        distillation: Distillation = Distillation(alpha=0.0),
        **common: Any,
    ) -> None:
        super().__init__(density=density, distillation=distillation, **common)
        self.prune = prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.dense_stage(), MovementPruning(self.prune, self.density)]
