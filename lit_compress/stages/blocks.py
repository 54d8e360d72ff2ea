"""Removal of whole blocks, evenly spaced or by measured loss: the one-shot step of Layers.

Equations and deviations are in methods/layers.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lit_compress.calibration.statistics import OfModel, Reduce, frozen, real_rows
from lit_compress.data.datamodule import DataModule
from lit_compress.models.shorten import check_blocks, holds_first, shorten, stack_lengths
from lit_compress.models.sites import Model, module_at
from lit_compress.models.surgery import Structure, with_same_parameters
from lit_compress.stages.base import Limits, Training
from lit_compress.stages.compression import CALIBRATION_SEED, Calibration, Compression, Items, Measured
from lit_compress.tasks.base import TaskType
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

DIGITS = 0.005  # a density of 0.33 keeps a third of the blocks
GROUP = 5  # blocks that are measured again together: one run of the dense model and one of the base serve them all
Kept = dict[str, list[int]]  # name of a list of blocks -> numbers of the kept blocks, rising
Block = tuple[str, int]  # the name of its list, and its number
Outputs = dict[Block, Any]


def evenly_spaced(total: int, count: int, first: bool = False) -> list[int]:
    """Return ``count`` evenly spaced numbers below ``total``, floor((j + 1/2) total / count); ``first``: 0 is one.

    >>> evenly_spaced(6, 2), evenly_spaced(12, 4), evenly_spaced(6, 2, first=True)
    ([1, 4], [1, 4, 7, 10], [0, 4])
    """
    numbers = [(2 * j + 1) * total // (2 * count) for j in range(count)]
    return [0, *numbers[1:]] if first else numbers


@dataclass(frozen=True)
class KeptBlocks(Training):
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


class BlockRemoval(Compression):
    """Keeps some of the transformer blocks.

    Args:
        settings: how they are chosen.
        density: fraction of the blocks that is kept.
        exact: False to read a density of 0.33 as a third.
    """

    by_block = False  # blocks change their numbers

    def __init__(self, settings: KeptBlocks, density: float, exact: bool = False) -> None:
        self.settings, self.density, self.exact = settings, density, exact

    def counts(self, net: Model) -> dict[str, int]:
        """Return name of each list of blocks -> how many are kept; a UserError if none."""
        totals = {path: total for path, (_, total) in stack_lengths(net).items()}
        density = self.density + (0.0 if self.exact else DIGITS)
        counts = {path: floor(density * total + 1e-9) for path, total in totals.items()}
        if not all(counts.values()):
            shortest = min(totals.values())
            raise UserError(
                f"model.density: {self.density:.4g} keeps none of {shortest} blocks; nearest valid value "
                f"{1 / shortest + 5e-5:.4f}"
            )
        return counts

    def density_left(self, net: Model) -> float:
        """Return the fraction of the blocks that was kept."""
        return self.share

    def check(self, net: Model) -> None:
        """Refuse architectures whose blocks cannot be removed, and sizes that are not possible."""
        check_blocks(net, alike=False)
        self.counts(net)

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether forwards need the labels."""
        return self.settings.choice == "measured" and kind.reads_labels

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the losses of models without a block; None for evenly spaced blocks."""
        if self.settings.choice == "even":
            return None
        batches = data.calibration_dataloader(self.examples(data), CALIBRATION_SEED, "prune.examples")
        return Calibration(BlockLosses(self.counts(net)), batches)

    def examples(self, data: DataModule) -> int:
        """Return how many training examples decide."""
        return self.settings.examples or min(128, data.train_size())

    def record(self, data: Any) -> dict[str, Any] | None:
        """Return which blocks are kept; None without examples."""
        if self.settings.choice == "even":
            return None
        return {"choice": "measured", "examples": self.examples(data), "kept": self.kept}

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the kept blocks."""
        for path, numbers in statistics.items():
            yield (), {path: torch.tensor(numbers)}

    def plan(self, net: Model, measured: Measured | None = None) -> Kept:
        """Return the kept blocks as measured; else evenly spaced ones."""
        if measured:
            return {path: numbers.tolist() for path, numbers in measured.items()}
        totals, first = stack_lengths(net), holds_first(net)
        return {path: evenly_spaced(totals[path][1], count, first) for path, count in self.counts(net).items()}

    def fill(self, net: Model, plan: Kept, measured: Measured | None = None) -> None:
        """Remove the other blocks; of a model with values note the kept ones."""
        if net.device.type != "meta":
            behind, before = list[int](), 0
            for path, (_, total) in stack_lengths(net).items():  # a block gives what the next kept one reads
                behind += [before + number for number in (*plan[path][1:], total)]
                before += total
            self.kept, self.behind, self.share = plan, behind, len(behind) / before
        shorten(net, plan)

    def rebuilt(self, net: Model, structure: Structure, notes: dict[str, Any]) -> Model:
        """Keep the blocks that a checkpoint has."""
        self.fill(net, notes["calibration"]["kept"] if self.settings.choice == "measured" else self.plan(net))
        return net


@dataclass(frozen=True)
class BlockLosses(OfModel):
    """Removes block after block of a model: each time the one without which the divergence rises the least.

    The search is lazy (Minoux 1978, "Accelerated greedy algorithms for maximizing submodular set functions"). It
    assumes that the rise of a block is never below its last one, once more blocks are removed. Blocks are measured
    again in the order of their last rises, until the smallest new one is no larger than the next old one. The blocks
    before and behind the last removed one come first: in SmolLM2 their rises fell the most, by up to a third. So it may
    miss a block whose rise has fallen since. All processes have the same sums, and so measure the same blocks.

    Attributes:
        counts: name of each list of blocks -> how many are kept.
    """

    counts: Mapping[str, int]

    def choices(self, net: Model, kept: Kept) -> dict[Block, Kept]:
        """Return the other blocks by block of the lists that have too many; {} at the end."""
        return {
            (path, number): kept | {path: [other for other in numbers if other != number]}
            for path, numbers in kept.items()
            if len(numbers) > self.counts[path]
            for number in numbers[holds_first(net) :]
        }

    def answer(self, net: Model, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the kept blocks."""
        kept, loss, rises = all_blocks(net), 0.0, dict[Block, float]()
        while choices := self.choices(net, kept):
            queue, losses = sorted(choices, key=lambda block: rises.get(block, 0.0)), dict[Block, float]()
            size = GROUP if rises else len(queue)
            while queue and (not losses or min(rises[block] for block in losses) > rises[queue[0]]):
                group, queue = queue[:size], queue[size:]
                values = divergences(net, [choices[block] for block in group], batches, kind, reduce, kept)
                for block, value in zip(group, values, strict=True):
                    losses[block], rises[block] = value, value - loss
            best = min(losses, key=lambda block: rises[block])
            kept, loss, order = choices[best], losses[best], [*choices]
            place = order.index(best)
            rises |= dict.fromkeys(order[max(0, place - 1) : place + 2], -inf)
        return kept


def all_blocks(net: Model) -> Kept:
    """Return the numbers of all blocks by the name of their list."""
    return {path: list(range(total)) for path, (_, total) in stack_lengths(net).items()}


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
    base, outputs = all_blocks(net) if base is None else base, Outputs()
    first = _shortened(net, base)
    has_all = len([*first.parameters()]) == len([*net.parameters()])
    for key in [(path, number) for path, numbers in base.items() for number in range(len(numbers))]:
        module_at(first, "{}.{}".format(*key), nn.Module).register_forward_hook(
            lambda _, __, output, key=key: outputs.update({key: output})
        )
    smaller = [_continued(_shortened(net, kept), kept, base, outputs) for kept in choices]
    total = torch.zeros(len(choices) + 1, dtype=torch.float64)  # on the CPU, as some devices have no float64
    with frozen(net), torch.no_grad(), torch.autocast(net.device.type, enabled=False):
        for batch in track(batches, f"without 1 of {len(choices)} blocks", len(batches)):
            rows = real_rows(kind, batch, net.device, None)
            if not len(rows["index"]):
                continue
            answer = kind.run(first, rows)
            theirs = kind.logits(answer if has_all else kind.run(net, rows), rows)
            for i, other in enumerate(smaller):
                total[i] += kind.divergence(kind.logits(kind.run(other, rows), rows), theirs, rows)
            total[-1] += len(rows["index"])
    if reduce is not None:
        total = total.to(net.device, torch.float32)
        reduce(total)
    if not total.isfinite().all():
        raise UserError("calibration: an answer of the model is not finite; nearest: blocks that are evenly spaced")
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


def _shortened(net: Model, kept: Kept) -> Model:
    """Return a model of some blocks of ``net``, in evaluation mode; it shares parameters with ``net``."""
    small = with_same_parameters(net).eval()
    shorten(small, kept)
    return small
