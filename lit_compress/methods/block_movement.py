"""Block movement pruning: blocks of the attentions and neurons are masked by scores that are trained with the weights.

François Lagunas, Ella Charlaix, Victor Sanh, Alexander M. Rush, "Block Pruning For Faster Transformers", EMNLP 2021,
https://arxiv.org/abs/2109.04838; open points follow https://github.com/huggingface/nn_pruning.

    hybrid   one score S_B per block of b x b weights in the matrices of the attentions, and one per neuron, for its row
             of the first matrix of the feed-forward network and its column of the second
             W' = M * W,  dL/dS_B = sum_ij in B of dL/dW'_ij W_ij                          (stages/movement.py)
             L = (1 - alpha) L_task + alpha KL(teacher || student)
    filled   heads and neurons that are empty are cut away, the blocks that were masked in the other heads are weights
             again, and the model is fine-tuned with the teacher

Stages: dense (the teacher) -> prune (hybrid) -> retrain (filled).

Deviations:
    - The published M = [sigmoid(S) > tau], with lambda ||sigmoid(S)||_1 in L, gives some density; a budget needs a
      given one. So M keeps the best v(t) of all blocks and neurons together, ranked by S, each counted with its
      weights, without a penalty: movement pruning's top-v with one ranking.
    - A head without values (no block of v) or without readers (no block of o) adds nothing that depends on the text.
      Its other blocks are of no use: their place goes to the next best ones, and the export cuts the head.
    - Filling a head adds to the weights. So that the filled model has the density, the blocks of all attentions are
      rounded to a whole number of heads, the neurons get the rest, and that many heads are filled: those with the most
      blocks. The blocks of the others are dropped, which the paper does not do.
    - Blocks to be filled begin at zero: the filled model computes the same as the pruned one, except dropped heads. We
      did not find where the authors let them begin.
    - Biases are not masked (nn_pruning's ``bias_mask`` does it): biases of neurons and heads are removed with them, and
      the constant of a head without values goes into the next bias (exact in evaluation mode).
    - nn_pruning evaluates with the final masks, we with the present ones.
    - Where an attention has lost all heads, or a feed-forward network all neurons, it is removed, except its bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_compress.layers.training.masked import BlockMaskedLinear
from lit_compress.methods.base import Distillation, Method
from lit_compress.models.accounting import dense_site_params
from lit_compress.models.cut import add_constant, cut_units
from lit_compress.models.outline import cut_evenly
from lit_compress.models.record import parts_of
from lit_compress.models.sites import Model, SubLayer, held_part, module_at, of_kind, size_at, sublayers
from lit_compress.models.surgery import Structure, replace
from lit_compress.numerics.foreach import joined
from lit_compress.numerics.masks import keep_count, select_rows
from lit_compress.stages.base import Limits, Stage, Training
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.movement import MaskedUnits, MovementStage
from lit_compress.stages.unstructured import CubicSchedule
from lit_compress.utils.errors import UserError

_ROUNDS = 5  # of giving the place of useless blocks to others, which may leave some that are useless then


@dataclass(frozen=True)
class BlockMovementSettings(CubicSchedule):
    """How blocks and neurons are masked.

    Args:
        block: height and width of the blocks in the matrices of the attentions; divides their sizes.
    """

    block: int = 32
    limits: ClassVar[Limits] = {"prune.block": {"low": 1}}


class BlockPruning(MovementStage):
    """Train weights and scores; mask blocks and neurons by their scores."""

    settings: BlockMovementSettings

    def check(self, net: Model) -> None:
        """Refuse an architecture whose heads cannot be cut, blocks that do not divide, and less than a head."""
        super().check(net)
        parts, block = sublayers(net), self.settings.block
        if any("qkv_by_head" in part.sites for part in parts):
            raise UserError(
                f"model.backbone: queries, keys and values of '{net.config.model_type}' alternate by head, which "
                "BlockMovement cannot cut; Movement and ITP can"
            )
        for what, kind in (("heads", "attention"), ("neurons", "ffn")):
            different = {part.count(net) for part in of_kind(parts, kind)}
            if len(different) > 1:
                raise UserError(
                    f"model.backbone: {min(different)} and {max(different)} {what} in sub-layers of a model; all must "
                    "have the same number"
                )
        sites = [name for part in of_kind(parts, "attention") for name in part.sites.values()]
        sizes = {name: size_at(net, name) for name in sites}
        for name, (height, width) in sizes.items():
            if height % block or width % block:
                common = gcd(*(size for shape in sizes.values() for size in shape))
                near = min((size for size in range(1, common + 1) if common % size == 0), key=lambda s: abs(s - block))
                raise UserError(
                    f"prune.block: {block} x {block} blocks do not divide the {height} x {width} weights of '{name}'; "
                    f"nearest valid {near}"
                )
        cost, total = of_kind(parts, "attention")[0].price(net), dense_site_params(net)
        if keep_count(self.density, total) < cost:
            raise UserError(
                f"model.density: {self.density:g} is less than one head, {cost} of {total} weights; valid: at least "
                f"{cost / total + 5e-5:.4f}"
            )

    def outline(self, net: Model) -> Model:
        """Return ``net`` with fewer heads and neurons."""
        return cut_evenly(net, self.density)

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Put a masked layer at every site."""
        size = self.settings.block
        for part in sublayers(net):
            for role, name in part.sites.items():
                linear: Any = net.get_submodule(name)
                if part.kind == "attention":
                    layer = BlockMaskedLinear(linear, (size, size))
                elif role == "down":
                    layer = BlockMaskedLinear(linear, (linear.out_features, 1))
                else:
                    layer = BlockMaskedLinear(linear, (1, linear.in_features), copies=len(parts_of(role)))
                replace(net, name, layer)
        return net

    def find_units(self, net: Model) -> list[MaskedUnits]:
        """Return the blocks of every matrix of the attentions, then the neurons of every feed-forward network."""
        blocks, neurons, parts = list[MaskedUnits](), list[MaskedUnits](), sublayers(net)
        for part in parts:
            layers = [module_at(net, name, BlockMaskedLinear) for name in part.sites.values()]
            if part.kind == "attention":
                blocks += [MaskedUnits((layer,), self.settings.block**2) for layer in layers]
            else:
                neurons.append(MaskedUnits(tuple(layers), part.price(net)))
        self._blocks = len(blocks)
        self._attention = of_kind(parts, "attention")[0]
        self._head = self._attention.price(net)
        grids = [kind.layers[0].grid(kind.layers[0].mask).shape for kind in blocks]
        self._grids = dict(zip(self._attention.sites, grids, strict=False))  # all attentions have the same ones
        return blocks + neurons

    def best(self, scores: Sequence[Tensor], budget: int) -> list[Tensor]:
        """Return the masks of the best blocks and neurons; the blocks make a whole number of heads."""
        masks = self._useful(scores, self._costs, budget)
        number, cost = self._blocks, self.settings.block**2
        weights = joined(masks[:number]).sum() * cost  # stays on the device: the host would wait for it
        whole, rest = weights // self._head, weights % self._head
        whole = whole + (2 * rest + whole % 2 > self._head)  # rounded, halves to even
        heads = whole.clamp(1, budget // self._head) * self._head
        return [
            *self._useful(scores[:number], self._costs[:number], heads),
            *select_rows(scores[number:], self._costs[number:], budget - heads),
        ]

    def _useful(self, scores: Sequence[Tensor], costs: Sequence[int], budget: int | Tensor) -> list[Tensor]:
        """Return the masks of the best units that are not blocks of heads without values or readers.

        An accelerator makes every round: the host would wait to know whether one was the last. If no useless block is
        kept, the scores stay as they are, and a round changes nothing.
        """
        sizes, everything = [len(score) for score in scores], joined(scores)
        masks = select_rows(scores, costs, budget)
        for _ in range(_ROUNDS):
            kept = joined(masks[: self._blocks])
            useless = self._useless(kept)
            more = (kept & useless).any()
            if more.device.type == "cpu" and not more:
                break
            blocks, others = everything.tensor_split([len(kept)])
            blocks = blocks.masked_fill(useless & more, -torch.inf)
            everything = torch.cat([blocks, others])
            masks = select_rows(everything.split(sizes), costs, budget)
        return masks

    def _useless(self, kept: Tensor) -> Tensor:
        """Return which blocks are in heads without values or readers alone; both bool [blocks of all matrices]."""
        heads, values, size = self._attention.heads, self._attention.values, self.settings.block
        counts = [shape.numel() for shape in self._grids.values()]
        parts = kept.view(-1, sum(counts)).split(counts, 1)
        grids = {role: part.unflatten(1, shape) for (role, shape), part in zip(self._grids.items(), parts, strict=True)}
        rows = grids[values].any(2).repeat_interleave(size, 1).chunk(len(parts_of(values)), 1)[-1]
        columns = grids["o"].any(1).repeat_interleave(size, 1)
        has_values, is_read = (lines.unflatten(1, (heads, -1)).any(2) for lines in (rows, columns))
        closed, useless = ~(has_values & is_read), list[Tensor]()  # [attentions, heads]
        for role, grid in grids.items():
            axis, copies = 2 if role == "o" else 1, len(parts_of(role))
            lines = closed.repeat_interleave(grid.shape[axis] * size // (heads * copies), 1).repeat(1, copies)
            useless.append(lines.unflatten(1, (-1, size)).all(2).unsqueeze(3 - axis).expand_as(grid).flatten(1))
        return torch.cat(useless, 1).flatten()


class Filling(Stage):
    """Cut empty parts, make the heads that stay as far as the density allows dense, and train on."""

    density: float
    repeatable = True

    def __init__(self, settings: Training, density: float) -> None:
        super().__init__("retrain", settings)
        self.density = density

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Cut the pruned model; all remaining values in its matrices are trained, including zeros."""
        cut_empty(net, keep_count(self.density, dense_site_params(net)))
        return net


@torch.no_grad()
def cut_empty(net: Model, budget: int) -> None:
    """Remove from ``net``, in place, heads without values or readers and neurons without readers; they are zeros.

    Only the heads with the most weights that are not zero stay, as many as the ``budget`` of weights has place for.
    """
    parts = sublayers(net)
    attentions, ffns = of_kind(parts, "attention"), of_kind(parts, "ffn")
    counts = torch.stack([_fold_constants(net, part) for part in attentions])
    neurons = torch.stack([net.get_parameter(f"{part.last}.weight").ne(0).any(0) for part in ffns])
    held = held_part(parts)
    first = counts.new_zeros(counts.shape, dtype=torch.bool)
    if held is not None:  # it cannot go as a whole
        first[attentions.index(held), counts[attentions.index(held)].argmax()] = True
    used = int(neurons.sum()) * ffns[0].price(net)
    order = (counts + first * counts.max()).flatten().argsort(descending=True, stable=True)
    counts.view(-1)[order[max(0, budget - used) // attentions[0].price(net) :]] = 0
    kept = [*zip(attentions, (counts > 0) | first, strict=True), *zip(ffns, neurons, strict=True)]
    cut_units(net, {part.last: units for part, units in kept}, whole=True)


def _fold_constants(net: Model, part: SubLayer) -> Tensor:
    """Return how many weights of each head are not zero, float64 [heads]; 0 for heads without values or readers.

    A fraction below 1, the share in the squared weights of the readers, puts those with as many in an order. A head
    without values gives the bias of its values, whose product goes into the last bias.
    """
    values: Any = net.get_submodule(part.sites[part.values])
    reader: Any = net.get_submodule(part.last)
    copies = len(parts_of(part.values))
    columns = reader.weight.ne(0).sum(0).view(part.heads, -1).sum(1)
    rows = values.weight.ne(0).sum(1).chunk(copies)[-1].view(part.heads, -1).sum(1)
    constant = (rows == 0).repeat_interleave(reader.in_features // part.heads)
    if values.bias is not None and constant.any():
        add_constant(reader, constant, values.bias.chunk(copies)[-1][constant])
    squares = reader.weight.double().square().sum(0).view(part.heads, -1).sum(1)
    count = columns + squares / (1 + squares.sum())
    for role, name in part.sites.items():
        if role != "o":
            for weight in net.get_parameter(f"{name}.weight").chunk(len(parts_of(role))):
                count += weight.ne(0).sum(1).view(part.heads, -1).sum(1)
    return count * ((rows > 0) & (columns > 0))


class BlockMovement(Method):
    """Prune blocks of attentions and neurons by scores that are trained with the weights; then fill the heads left.

    Args:
        prune: schedule and masks of the pruning, and its training.
        retrain: training of the filled model.
    """

    prune: BlockMovementSettings = BlockMovementSettings()
    retrain: Training = Training()
    distillation = Distillation(alpha=0.9)

    def own_stages(self) -> list[Stage]:
        """Return prune, retrain."""
        return [BlockPruning(self.prune, self.density), Filling(self.retrain, self.density)]
