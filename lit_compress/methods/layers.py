"""Layers: keep some of the transformer blocks, then distil; the most common way to make a model smaller.

Evenly spaced blocks of the fine-tuned model are the student of DistilBERT (Sanh, Debut, Chaumond, Wolf 2019,
https://arxiv.org/abs/1910.01108) and of the layer reduction in sentence-transformers; blocks removed one after the
other by a measured loss are ShortGPT's kind of pruning (Men et al. 2024, https://arxiv.org/abs/2403.03853).

    even        of n blocks, numbers floor((j + 1/2) n / k), j = 0 .. k - 1
    measured    remove the block without which KL(model || model without it) on training rows is smallest, until k are
                left; every candidate is run (:class:`BlockLosses`)
    training    as in every method: labels, logits and hidden states of the dense model; state j of the k + 1 hidden
                states learns from the teacher's state round(j n / k)

The stages are dense -> prune. The export is an ordinary model: its configuration has fewer blocks.

Deviations:
    - ShortGPT ranks blocks once, by the cosine of their inputs and outputs. Here the loss of the whole model decides,
      again after every removal.
    - The first block stays if it alone has something that the others need: T5's table of positions, ModernBERT's
      missing norm.
    - An encoder and a decoder keep the same share of their blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lit_compress.calibration.statistics import OfModel, Reduce, frozen, real_rows
from lit_compress.data.datamodule import DataModule
from lit_compress.methods.base import OneShot
from lit_compress.models.shorten import check_blocks, holds_first, shorten, stack_lengths
from lit_compress.models.sites import Model, module_at
from lit_compress.models.surgery import Structure
from lit_compress.stages.base import Limits
from lit_compress.stages.compression import CALIBRATION_SEED, Calibration, Items, Measured
from lit_compress.stages.lora import Retraining
from lit_compress.tasks.base import TaskType
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.progress import track

DIGITS = 0.005  # a density of 0.33 keeps a third of the blocks
Kept = dict[str, list[int]]  # name of a list of blocks -> numbers of the kept blocks, rising
Outputs = dict[tuple[str, int], Any]  # of a block, by the name of its list and its number


def evenly_spaced(total: int, count: int, first: bool = False) -> list[int]:
    """Return ``count`` evenly spaced numbers below ``total``, floor((j + 1/2) total / count); ``first``: 0 is one.

    >>> evenly_spaced(6, 2), evenly_spaced(12, 4), evenly_spaced(6, 2, first=True)
    ([1, 4], [1, 4, 7, 10], [0, 4])
    """
    numbers = [(2 * j + 1) * total // (2 * count) for j in range(count)]
    return [0, *numbers[1:]] if first else numbers


@dataclass(frozen=True)
class KeptBlocks(Retraining):
    """Which blocks are kept, and how the smaller model is trained.

    Args:
        choice: ``even``: evenly spaced blocks; ``measured``: remove one block after the other, each time the one whose
            removal changes the model's answers on training rows the least.
        examples: number of training examples for ``measured``; None = 128, or all if there are fewer.
    """

    choice: Literal["even", "measured"] = "even"
    examples: int | None = None
    matters: ClassVar[dict[str, Any]] = {"examples": {"choice": ("measured",)}}
    limits: ClassVar[Limits] = {"prune.examples": {"low": 1}}


class Layers(OneShot):
    """Keep some of the transformer blocks, evenly spaced or by measured loss, then distil; an ordinary model is left.

    Args:
        density: fraction of the blocks that is kept; the largest number of blocks that fits, by default half of them.
        blocks: number of blocks that is kept, in place of ``density``.
        prune: the choice of the blocks, and training afterwards.
    """

    name, rounds = "blocks", False
    by_block = False  # blocks change their numbers
    usual_density = 0.5
    blocks: int | None = None
    prune: KeptBlocks = KeptBlocks()

    def __post_init__(self) -> None:
        require(self, "model.blocks", low=1)
        self.decides_alone("blocks")

    @property
    def keeps_all(self) -> bool:
        """Whether every block is kept."""
        return self.density >= 1 and self.blocks is None

    def counts(self, net: Model) -> dict[str, int]:
        """Return name of each list of blocks -> how many are kept; a UserError if none, or more than there are."""
        totals = {path: total for path, (_, total) in stack_lengths(net).items()}
        shortest = min(totals.values())
        if self.blocks is not None:
            if self.blocks > shortest:
                raise UserError(
                    f"model.blocks: {self.blocks} is more than the {shortest} blocks of the model; nearest valid value "
                    f"{shortest}"
                )
            return dict.fromkeys(totals, self.blocks)
        density = self.density + (DIGITS if self.budget is None else 0.0)
        counts = {path: floor(density * total + 1e-9) for path, total in totals.items()}
        if not all(counts.values()):
            raise UserError(
                f"model.density: {self.density:.4g} keeps none of {shortest} blocks; nearest valid value "
                f"{1 / shortest + 5e-5:.4f}"
            )
        return counts

    def density_left(self, net: Model) -> float:
        """Return the fraction of the blocks that was kept."""
        return self.share

    def check(self, net: Model) -> None:
        """Refuse architectures whose blocks are not known one by one, and numbers of blocks that are not possible."""
        check_blocks(net, alike=False)
        self.counts(net)

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether forwards need the labels."""
        return self.prune.choice == "measured" and kind.reads_labels

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the losses of models without a block; None for evenly spaced blocks."""
        if self.prune.choice == "even":
            return None
        batches = data.calibration_dataloader(self.examples(data), CALIBRATION_SEED, "prune.examples")
        return Calibration(BlockLosses(self.counts(net)), batches)

    def examples(self, data: DataModule) -> int:
        """Return how many training examples decide."""
        return self.prune.examples or min(128, data.train_size())

    def record(self, data: Any, loss: float) -> dict[str, Any] | None:
        """Return which blocks are kept, and the divergence on the examples that decided; None without examples."""
        if self.prune.choice == "even":
            return None
        return {
            "choice": "measured", "examples": self.examples(data), "kept": self.kept, "estimated_loss": loss
        }  # fmt: skip

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the numbers of the kept blocks, and their loss."""
        for path, numbers in statistics.items():
            yield (), {path: torch.tensor(numbers)}

    def plan(self, net: Model, measured: Measured | None = None) -> Kept:
        """Return the numbers of the kept blocks by list, evenly spaced or as measured."""
        if measured:
            return {path: numbers.tolist() for path, numbers in measured.items() if path != "loss"}
        totals, first = stack_lengths(net), holds_first(net)
        return {path: evenly_spaced(totals[path][1], count, first) for path, count in self.counts(net).items()}

    def loss(self, net: Model, plan: Kept, measured: Measured) -> float:
        """Return the divergence without the other blocks; 0 for evenly spaced ones."""
        return float(measured["loss"]) if measured else 0.0

    def fill(self, net: Model, plan: Kept, measured: Measured | None = None) -> None:
        """Remove the other blocks; of a model with values note what is kept."""
        behind, before = list[int](), 0
        for path, (_, total) in stack_lengths(net).items():  # a block gives what the next kept one reads
            behind += [before + number for number in (*plan[path][1:], total)]
            before += total
        if net.device.type != "meta":
            self.kept, self.behind, self.share = plan, behind, len(behind) / before
        shorten(net, plan)

    def rebuilt(self, net: Model, structure: Structure, notes: dict[str, Any]) -> Model:
        """Keep the blocks that a checkpoint has."""
        self.fill(net, notes["calibration"]["kept"] if self.prune.choice == "measured" else self.plan(net))
        return net


@dataclass(frozen=True)
class BlockLosses(OfModel):
    """The blocks whose removal, one after the other, changes the model's answers the least.

    Each time the block is removed without which :func:`divergences` is smallest.

    Attributes:
        counts: name of each list of blocks -> how many are kept.
    """

    counts: Mapping[str, int]

    def answer(self, net: Model, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the numbers of the kept blocks by list, and the ``loss`` of the model of them; 0 if it has all."""
        kept = {path: list(range(total)) for path, (_, total) in stack_lengths(net).items()}
        loss = 0.0
        while choices := [
            kept | {path: [other for other in numbers if other != number]}
            for path, numbers in kept.items()
            if len(numbers) > self.counts[path]
            for number in numbers[holds_first(net) :]
        ]:
            losses = divergences(net, choices, batches, kind, reduce, kept)
            loss = min(losses)
            kept = choices[losses.index(loss)]
        return kept | {"loss": loss}


def divergences(
    net: Model, choices: Sequence[Kept], batches: Any, kind: TaskType,
    reduce: Reduce = None, base: Kept | None = None,
) -> list[float]:  # fmt: skip
    """Return for each choice of kept blocks the mean over examples of KL(model || model of these blocks).

    For regression and vectors, half the squared difference of the outputs. A choice runs only the blocks behind the
    first one in which it differs from ``base``. The outputs of the others are kept, of one batch at a time.

    Args:
        net: with its task's head; it is not changed.
        choices: the kept blocks.
        batches: of the examples, with ``index``, in the same order whenever they are iterated.
        reduce: in-place all-reduce (SUM) over processes with other examples.
        base: blocks of which most choices have the first ones; None: all blocks.
    """
    whole = {path: list(range(total)) for path, (_, total) in stack_lengths(net).items()}
    base, outputs = whole if base is None else base, Outputs()
    first = _with_blocks(net, base)
    for key in [(path, number) for path, numbers in base.items() for number in range(len(numbers))]:
        module_at(first, "{}.{}".format(*key), nn.Module).register_forward_hook(
            lambda _, __, output, key=key: outputs.update({key: output})
        )
    smaller = [_continued(_with_blocks(net, kept), kept, base, outputs) for kept in choices]
    total = torch.zeros(len(choices) + 1, dtype=torch.float64)  # on the CPU, as some devices have no float64
    with frozen(net), torch.no_grad(), torch.autocast(net.device.type, enabled=False):
        for batch in track(batches, f"without 1 of {len(choices)} blocks", len(batches)):
            rows = real_rows(kind, batch, net.device, None)
            if not len(rows["index"]):
                continue
            answer = kind.run(first, rows)
            theirs = kind.logits(answer if base == whole else kind.run(net, rows), rows)
            for i, other in enumerate(smaller):
                total[i] += kind.divergence(kind.logits(kind.run(other, rows), rows), theirs, rows)
            total[-1] += len(rows["index"])
    if reduce is not None:
        total = total.to(net.device, torch.float32)
        reduce(total)
    return (total[:-1] / total[-1]).tolist()


def _continued(small: Model, kept: Kept, base: Kept, outputs: Outputs) -> Model:
    """Let the first blocks of ``small`` give kept outputs, up to the first block that ``base`` has not there."""
    for path, numbers in kept.items():
        for number, (own, other) in enumerate(zip(numbers, base[path], strict=False)):
            if own != other:
                return small
            block = module_at(small, f"{path}.{number}", nn.Module)
            vars(block)["forward"] = lambda *_, _key=(path, number), **__: outputs[_key]
        if len(numbers) != len(base[path]):
            return small
    return small


def _with_blocks(net: Model, kept: Kept) -> Model:
    """Return a model of some blocks of ``net``, in evaluation mode; it shares parameters and buffers with ``net``."""
    shared = {id(value): value for values in (net.parameters(), net.buffers()) for value in values}
    small = copy.deepcopy(net, shared).eval()
    shorten(small, kept)
    return small
