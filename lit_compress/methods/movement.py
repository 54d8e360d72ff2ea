"""Movement pruning of neurons: the baseline "Movement" of LoSparse's tables.

Victor Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, https://arxiv.org/abs/2005.07683;
whole rows as in Lagunas et al., "Block Pruning For Faster Transformers", 2021, https://arxiv.org/abs/2109.04838, and
its program nn_pruning (a block is one output row of torch's weight [out, in]). LoSparse says of its baseline: "a
trainable mask to each neuron [...] When the mask is smaller than a threshold, the corresponding neuron is pruned".

    W' = m[:, None] * W, b' = m * b, m = binarise(s), dL/ds = dL/dm               layers/masked.py
    hard    m keeps the best v(t) of all rows, v cubic from 1 to the density
    soft    m = [sigmoid(s) > tau(t)], tau = tau_f (1 - r^3) with the cubic's r(t), from 0 to tau_f
            L += lambda(t) mean over {attention, feed-forward} of mean over matrices of mean_i sigmoid(s_i),
            lambda(t) = lambda_f tau(t) / tau_f

Choices:
    - Rows of all matrices compete, each at the cost of its parameters, so that the density is met (nn_pruning ranks
      every matrix by itself). LoSparse does not say which form it ran: hard, as its ratios are exact.
    - The masks are set once, after an optimizer step, for all that follows until the next: micro-batches, ranks and
      validation see the same ones. nn_pruning evaluates with the final threshold, we with the present one.
    - The scores start at 0 and have a learning rate of their own and no decay.
    - The penalty enters as its gradient, added to the whole gradient of the scores before clipping: once per optimizer
      step, the same on shards.
    - soft always keeps int(0.005 out) + 1 rows of a matrix, as nn_pruning does. Its density follows from
      ``penalty``: the run says so when it ends above the one asked for.
    - No distillation unless asked for (nn_pruning: 0.9, temperature 2).

What is left is exact in evaluation: rows that were removed are not stored, and a neuron or a head whose rows are all
gone goes with the columns it fed, as in ITP (cut.py). ``density`` counts kept rows; the export may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.families import find_sites
from lit_compress.layers import MaskedLinear
from lit_compress.masks import keep_count, rows_above, select_rows
from lit_compress.methods.base import Distillation, Method
from lit_compress.methods.pruning_stage import Ramp, RampStage
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.surgery import Structure, replace
from lit_compress.tensors import local, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MovementRamp(Ramp):
    """How rows are switched off.

    Args:
        form: ``hard`` keeps the best rows up to the density, ``soft`` those whose sigmoid(score) is above a threshold.
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
        if self.score_learning_rate <= 0:
            raise UserError(f"prune.score_learning_rate: {self.score_learning_rate} is not above 0; usual: 1e-2")
        if not 0 < self.threshold < 1:
            raise UserError(f"prune.threshold: {self.threshold} is not in (0, 1); usual: 0.1")
        if self.penalty < 0:
            raise UserError(f"prune.penalty: {self.penalty} is below 0, the smallest valid value")


class MovementPruning(RampStage):
    """Train weights and row scores; switch rows off by their scores.

    Args:
        settings: how.
        density: final kept fraction of the sites' weights.
    """

    settings: MovementRamp

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Put a masked layer at every site."""
        net = super().build(method, previous, structure)
        for site in find_sites(net):
            replace(net, site.name, MaskedLinear(net.get_submodule(site.name)))  # type: ignore[arg-type]
        return net

    def attach(self, net: PreTrainedModel) -> None:
        """Find the masked layers and, for each, its share of the penalty: the groups' means are averaged."""
        sites = find_sites(net)
        self._layers: list[MaskedLinear] = [net.get_submodule(site.name) for site in sites]  # type: ignore[misc]
        self._costs = [layer.in_features for layer in self._layers]
        self._total = sum(layer.out_features * layer.in_features for layer in self._layers)
        groups = [site.role in ("gate", "up", "down") for site in sites]
        self._shares = [1 / (len(set(groups)) * groups.count(group)) for group in groups]

    def own_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """Give the scores their learning rate."""
        scores = [layer.score for layer in self._layers]
        return [{"params": scores, "lr": self.settings.score_learning_rate, "weight_decay": 0.0}]

    def progress(self, step: int) -> float:
        """Return tau(step) / tau_f, from 0 to 1."""
        return (1 - self.target(step)) / (1 - self.density) if self.density < 1 else 0.0

    def losses(self, method: Host, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Note lambda(t) of this optimizer step."""
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
        """Set the masks for everything until the next optimizer step."""
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
        """Return the share of the sites' weights that is switched on."""
        kept = sum(int(layer.mask.sum()) * cost for layer, cost in zip(self._layers, self._costs, strict=True))
        return kept / self._total

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show the achieved density and what leads to it."""
        if self.settings.form == "hard":
            return {"target": self.target(step), "density": self.achieved()}
        return {"threshold": self.settings.threshold * self.progress(step), "density": self.achieved()}

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Say if the soft form has missed the density."""
        if self.achieved() > self.density:
            rank_zero_warn(
                f"prune.penalty: {self.settings.penalty} left {self.achieved():.3f} of the weights, more than "
                f"model.density {self.density}; raise it, or use prune.form hard"
            )


class Movement(Method):
    """Prune neurons by scores that learn with the weights.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: kept fraction of the weights of the transformer blocks' matrices, in (0, 1].
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        prune: training with pruning.
        distillation: how the teacher is listened to while pruning.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.20,
        teacher: str | None = None,
        dense: Training = Training(),
        prune: MovementRamp = MovementRamp(),
        distillation: Distillation = Distillation(alpha=0.0),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.prune = dense, prune

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), prune."""
        return [*self.first(self.dense), MovementPruning(self.prune, self.density)]
