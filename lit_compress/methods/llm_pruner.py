"""LLM-Pruner: heads and neurons that the loss hardly needs go at once, with all weights that are coupled to them.

Xinyin Ma, Gongfan Fang, Xinchao Wang, "LLM-Pruner: On the Structural Pruning of Large Language Models", NeurIPS 2023,
https://arxiv.org/abs/2305.11627; program: https://github.com/horseee/LLM-Pruner.

    groups        a head: its rows of q, k, v and its columns of o; a neuron: its rows of gate and up, its
                  column of down (section 3.1)                                        models/sites.py, models/cut.py
    element^1     I_w = |w dL/dw| (section 3.2)
    group         the sum over its weights; the paper also tries product, maximum, and the last matrix, o or down
    pruning       in every block the same share of heads and of neurons, the least important; the first and the last
                  blocks stay whole; then the model is trained (section 3.3)

The stages are dense -> prune. Gradients are of the task's loss, on 10 examples as in the program.

Deviations, and where paper and program differ:
    - The paper also scores by element^2, with second derivatives, and by vector, |sum_j w_j dL/dw_j| of a row.
    - Recovery trains all weights; the paper's trains low-rank updates (LoRA), at a learning rate of 1e-4.
    - The paper calibrates on BookCorpus and recovers on instructions; here both use the task's training examples.
    - Heads are whole numbers: each block keeps the nearest to the share, at least one, and neurons make up for it, so
      that a density is met up to one neuron. The paper's ratio counts the pruned blocks, 25 % for 20 % of LLaMA-7B.
    - ``shape uniform`` (not in the program) keeps the same numbers in all blocks, within the density.
    - Only heads and neurons go ("block-wise"); the paper's channels of the residual stream stay. With grouped queries
      the queries of a key go with it, which the paper's LLaMA does not have.
    - The paper prunes decoders; here every family; ALBERT and Phi-3 keep their heads, whose numbers are fixed in
      their code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_compress.calibration.gradients import Gradients
from lit_compress.data.datamodule import DataModule
from lit_compress.methods.base import OneShot
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.cut import cut_units
from lit_compress.models.outline import even_counts
from lit_compress.models.record import parts_of, split_parts
from lit_compress.models.sites import Model, SubLayer, cuttable
from lit_compress.stages.base import Limits, Training
from lit_compress.stages.compression import CALIBRATION_SEED, Calibration, Items, Measured
from lit_compress.stages.distillation import Distillation
from lit_compress.utils.errors import UserError


@dataclass(frozen=True)
class CoupledPruning(Training):
    """How heads and neurons are chosen, and how the pruned model is trained.

    Args:
        keep_first: number of blocks, from the first, that stay whole.
        keep_last: number of blocks, from the last, that stay whole.
        examples: number of training examples whose gradients decide.
    """

    epochs: int = 2
    keep_first: int = 0
    keep_last: int = 0
    examples: int = 10
    limits: ClassVar[Limits] = {
        "prune.keep_first": {"low": 0}, "prune.keep_last": {"low": 0}, "prune.examples": {"low": 1}
    }  # fmt: skip


def pruned_parts(net: Model, settings: CoupledPruning) -> list[SubLayer]:
    """Return the sub-layers of ``net`` that lose heads or neurons; a UserError if all blocks stay whole."""
    parts, (first, last) = cuttable(net), (settings.keep_first, settings.keep_last)
    count = 1 + parts[-1].layer
    if first + last >= count:
        raise UserError(
            f"prune.keep_first {first}, prune.keep_last {last}: they leave none of the {count} blocks to prune; the "
            f"sum must be below {count}"
        )
    return [part for part in parts if first <= part.layer < count - last]


def kept_counts(net: Model, settings: CoupledPruning, density: float, step: int = 1) -> dict[str, int]:
    """Return by last matrix how many heads or neurons every pruned sub-layer keeps; only shapes are read.

    ``density`` counts all sites' weights; numbers of neurons are multiples of ``step``.

    Raises:
        UserError: a head and a step of neurons in each are more than the density leaves.
    """
    parts = pruned_parts(net, settings)
    units, price = {part.last: part.count(net) for part in parts}, {part.last: part.price(net) for part in parts}
    heads, neurons = ([part.last for part in parts if part.kind == kind] for kind in ("attention", "ffn"))
    total, cut = dense_site_params(net), sum(units[name] * price[name] for name in units)
    room = floor(density * total + 1e-6) - (total - cut)
    least = sum(price[name] * (1 if name in heads else step) for name in units)
    if room < least:
        raise UserError(
            f"model.density: {density:.4g} cannot be reached by LLMPruner, which leaves a head and {step} neuron(s) in "
            f"every block, and {total - cut:,} weights of what stays whole; the smallest is "
            f"{(total - cut + least) / total + 5e-5:.4f}"
        )
    share = room / cut
    kept = {name: max(1, floor(share * units[name] + 0.5)) for name in heads}
    if room - sum(kept[name] * price[name] for name in heads) < step * sum(price[name] for name in neurons):
        kept = {name: max(1, floor(share * units[name])) for name in heads}
    room -= sum(kept[name] * price[name] for name in heads)
    share = room / sum(units[name] * price[name] for name in neurons)
    kept |= {name: max(step, min(units[name], floor(share * units[name] + 1e-9)) // step * step) for name in neurons}
    room -= sum(kept[name] * price[name] for name in neurons)
    for name in neurons:  # what rounding leaves
        if step * price[name] <= room and kept[name] + step <= units[name]:
            kept[name], room = kept[name] + step, room - step * price[name]
    return {name: kept[name] for name in units}


def group_importance(net: Model, part: SubLayer, gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the importance of every head or neuron of a sub-layer, float64 [units], by gradients of its sites (Eq. 5).

    It is the sum of |w g| over the unit's elements of all matrices.
    """
    units, scores = part.count(net), []
    for role, name in part.sites.items():
        weight, reads = net.get_parameter(f"{name}.weight").detach(), role in ("o", "down")
        w, g = (m.mT if reads else m for m in (weight, gradients[name]))
        for rows in split_parts(role, torch.arange(len(w)), len(w) // (len(parts_of(role)) * part.heads)):
            scores.append((w[rows].double() * g[rows].double()).abs().sum(1).view(units, -1).sum(1))
    return torch.stack(scores).sum(0)


class LLMPruner(OneShot):
    """Prune the least important heads and neurons at once, by first-order scores on a few examples, then retrain.

    Args:
        prune: the scores, the blocks that stay whole, and training afterwards.
    """

    usual_density = 0.8
    uniform = True
    prune: CoupledPruning = CoupledPruning()
    distillation = Distillation(alpha=0.0)

    def __post_init__(self) -> None:
        if self.kind.loss == "vectors":
            raise UserError(
                f"data.task: '{self.task.name}' gives vectors, which have no loss of single texts, and LLMPruner scores"
                " heads and neurons by it; nearest: SecondOrder with retrain.removes structures"
            )

    def counts(self, net: Model) -> dict[str, int]:
        """Return how many heads or neurons every pruned sub-layer keeps."""
        if self.shape == "uniform":
            return even_counts(net, self.density, self.round_to or 1)
        return kept_counts(net, self.prune, self.density, self.round_to or 1)

    def check(self, net: Model) -> None:
        """Refuse blocks that leave nothing to prune, and densities that cannot be reached."""
        pruned_parts(net, self.prune)
        first, last = self.prune.keep_first, self.prune.keep_last
        if self.shape == "uniform" and first + last:
            raise UserError(
                f"model.shape: 'uniform' has as many units in every block; prune.keep_first {first}, prune.keep_last "
                f"{last} keep some whole; nearest: 0, 0"
            )
        self.counts(net)

    def parts(self, net: Model) -> list[SubLayer]:
        """Return the sub-layers that lose units; only shapes are read."""
        counts = self.counts(net)
        return [part for part in pruned_parts(net, self.prune) if part.last in counts]

    def calibration(self, net: Model, data: DataModule) -> Calibration:
        """Return the gradients of the matrices of the sub-layers that lose units."""
        batches = data.calibration_dataloader(self.prune.examples, CALIBRATION_SEED, "prune.examples")
        sites = [name for part in self.parts(net) for name in part.sites.values()]
        return Calibration(Gradients(sites=sites), batches)

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield which units of a sub-layer stay, bool [units]."""
        counts = self.counts(net)
        for part in (part for part in self.parts(net) if part.last in names):
            order = group_importance(net, part, statistics).argsort(descending=True, stable=True)
            best = torch.zeros(len(order), dtype=torch.bool).index_fill(0, order[: counts[part.last]], True)
            yield tuple(part.sites.values()), {f"{part.last}.kept": best}

    def plan(self, net: Model, measured: Measured | None = None) -> dict[str, Tensor]:
        """Return the units that stay by last matrix, bool [units]; without measurements the first ones."""
        if measured is not None:
            return {part.last: measured[f"{part.last}.kept"] for part in self.parts(net)}
        counts = self.counts(net)
        return {part.last: torch.arange(part.count(net)) < counts[part.last] for part in self.parts(net)}

    def fill(self, net: Model, plan: dict[str, Tensor], measured: Measured | None) -> None:
        """Remove heads and neurons."""
        cut_units(net, plan)
