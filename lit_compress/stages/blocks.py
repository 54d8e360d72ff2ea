"""Removal of whole blocks or of sub-layers, evenly spaced or by measured loss: the one-shot step of Layers.

Equations and deviations are in methods/layers.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lit_compress.calibration.statistics import OfModel, Reduce, frozen, real_rows
from lit_compress.data.datamodule import DataModule
from lit_compress.models.cut import cut_units
from lit_compress.models.shorten import check_blocks, holds_first, shorten, stack_lengths
from lit_compress.models.sites import Model, module_at, sublayers
from lit_compress.models.surgery import Structure, with_same_parameters
from lit_compress.stages.base import Limits
from lit_compress.stages.compression import CALIBRATION_SEED, Calibration, Compression, Items, Measured
from lit_compress.stages.lora import Retraining
from lit_compress.tasks.base import TaskType
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

DIGITS = 0.005  # a density of 0.33 keeps a third of the blocks
GROUP = 5  # parts that are measured again together: one run of the dense model and one of the base serve them all
# name of a list of blocks -> numbers of the kept blocks, rising; or for every block whether each sub-layer is kept
Kept = dict[str, list[Any]]
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
        parts: ``blocks``; or ``sublayers``, for ``measured``: an attention or a feed-forward network can be removed
            alone, and ``density`` counts weights. The export needs code of its own.
        examples: number of training examples for ``measured``; None = 128, or all if there are fewer.
    """

    choice: Literal["even", "measured"] = "even"
    parts: Literal["blocks", "sublayers"] = "blocks"
    examples: int | None = None
    matters: ClassVar[dict[str, Any]] = {"parts": {"choice": ("measured",)}, "examples": {"choice": ("measured",)}}
    limits: ClassVar[Limits] = {"prune.examples": {"low": 1}}


class BlockRemoval(Compression):
    """Keeps some of the transformer blocks, or of their sub-layers.

    Args:
        settings: how they are chosen.
        density: fraction of the blocks, or of the weights of their matrices, that is kept.
        blocks: number of blocks that is kept, in place of ``density``.
        exact: False to read a density of 0.33 as a third.
    """

    by_block = False  # blocks change their numbers

    def __init__(self, settings: KeptBlocks, density: float, blocks: int | None = None, exact: bool = False) -> None:
        self.settings, self.density, self.blocks, self.exact = settings, density, blocks, exact
        self.decided_by_data = settings.parts == "sublayers"

    @property
    def keeps_all(self) -> bool:
        """Whether every block is kept."""
        return super().keeps_all and self.blocks is None

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
        density = self.density + (0.0 if self.exact else DIGITS)
        counts = {path: floor(density * total + 1e-9) for path, total in totals.items()}
        if not all(counts.values()):
            raise UserError(
                f"model.density: {self.density:.4g} keeps none of {shortest} blocks; nearest valid value "
                f"{1 / shortest + 5e-5:.4f}"
            )
        return counts

    def density_left(self, net: Model) -> float:
        """Return the fraction of the blocks, or of the weights of their matrices, that was kept."""
        return self.share if self.settings.parts == "blocks" else super().density_left(net)

    def check(self, net: Model) -> None:
        """Refuse architectures whose blocks or sub-layers cannot be removed, and sizes that are not possible."""
        if self.settings.parts == "blocks":
            check_blocks(net, alike=False)
        self.search(net)

    def reads_labels(self, kind: TaskType) -> bool:
        """Return whether forwards need the labels."""
        return self.settings.choice == "measured" and kind.reads_labels

    def calibration(self, net: Model, data: DataModule) -> Calibration | None:
        """Return the losses of models without a part; None for evenly spaced blocks."""
        if self.settings.choice == "even":
            return None
        batches = data.calibration_dataloader(self.examples(data), CALIBRATION_SEED, "prune.examples")
        return Calibration(self.search(net), batches)

    def search(self, net: Model) -> Losses:
        """Return the search for the parts that are removed; a UserError if none of them would be left."""
        if self.settings.parts == "blocks":
            return BlockLosses(self.counts(net))
        weights = [part.weights(net) for part in sublayers(net, gated=False)]
        if (least := max(weights) / sum(weights)) > self.density:
            raise UserError(
                f"model.density: {self.density:.4g} keeps none of {len(weights)} sub-layers; nearest valid value "
                f"{least + 5e-5:.4f}"
            )
        return SubLayerLosses(self.density)

    def examples(self, data: DataModule) -> int:
        """Return how many training examples decide."""
        return self.settings.examples or min(128, data.train_size())

    def record(self, data: Any) -> dict[str, Any] | None:
        """Return which parts are kept; None without examples."""
        if self.settings.choice == "even":
            return None
        return {"choice": "measured", "examples": self.examples(data), "kept": self.kept}

    def measure(self, net: Model, names: Collection[str], statistics: dict[Any, Any]) -> Items:
        """Yield the kept parts."""
        for path, numbers in statistics.items():
            yield (), {path: torch.tensor(numbers)}

    def plan(self, net: Model, measured: Measured | None = None) -> Kept:
        """Return the kept parts as measured; else evenly spaced blocks, or sub-layers, of which networks go first."""
        if measured:
            return {path: numbers.tolist() for path, numbers in measured.items()}
        if self.settings.parts == "sublayers":
            return SubLayerLosses(self.density).first(net)
        totals, first = stack_lengths(net), holds_first(net)
        return {path: evenly_spaced(totals[path][1], count, first) for path, count in self.counts(net).items()}

    def fill(self, net: Model, plan: Kept, measured: Measured | None = None) -> None:
        """Remove the other parts; of a model with values note the kept ones."""
        if net.device.type != "meta":
            self.kept = plan
            if self.settings.parts == "blocks":
                behind, before = list[int](), 0
                for path, (_, total) in stack_lengths(net).items():  # a block gives what the next kept one reads
                    behind += [before + number for number in (*plan[path][1:], total)]
                    before += total
                self.behind, self.share = behind, len(behind) / before
        remove_others(net, plan)

    def rebuilt(self, net: Model, structure: Structure, notes: dict[str, Any]) -> Model:
        """Keep the parts that a checkpoint has."""
        self.fill(net, notes["calibration"]["kept"] if self.settings.choice == "measured" else self.plan(net))
        return net


def flags_of(kept: Kept) -> list[bool]:
    """Return whether each sub-layer is kept, in forward order; [] of blocks."""
    return [flag for blocks in kept.values() for block in blocks if isinstance(block, list) for flag in block]


def kept_sublayers(net: Model, flags: Sequence[bool]) -> Kept:
    """Return by block whether its sub-layers are kept."""
    kept = {path: [list[bool]() for _ in range(total)] for path, (_, total) in stack_lengths(net).items()}
    for part, flag in zip(sublayers(net, gated=False), flags, strict=True):
        path, _, number = part.block.rpartition(".")
        kept[path][int(number)].append(flag)
    return kept


def remove_others(net: Model, kept: Kept) -> None:
    """Remove the other blocks or sub-layers of ``net``, in place."""
    if flags := flags_of(kept):
        parts = zip(sublayers(net, gated=False), flags, strict=True)
        units = {part.last: torch.zeros(part.count(net), dtype=torch.bool) for part, flag in parts if not flag}
        cut_units(net, units, whole=True)
    else:
        shorten(net, kept)


class Losses(OfModel):
    """Removes part after part of a model: each time the one without which the divergence rises the least per weight.

    The search is lazy (Minoux 1978, "Accelerated greedy algorithms for maximizing submodular set functions"). It
    assumes that the rise of a part is never below its last one, once more parts are removed. Parts are measured again
    in the order of their last rises, until the smallest new one is no larger than the next old one. The parts before
    and behind the last removed one come first: in SmolLM2 their rises fell the most, by up to a third. So it may miss a
    part whose rise has fallen since. All processes have the same sums, and so measure the same parts.
    """

    def begin(self, net: Model) -> Kept:
        """Return all parts, by default the numbers of the blocks."""
        return {path: list(range(total)) for path, (_, total) in stack_lengths(net).items()}

    @abstractmethod
    def choices(self, net: Model, kept: Kept) -> dict[Any, tuple[Kept, int]]:
        """Return by part that can be removed next the parts that are left without it, its weights; {} at the end."""

    def answer(self, net: Model, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the kept parts."""
        kept, loss, rises = self.begin(net), 0.0, dict[Any, float]()
        while choices := self.choices(net, kept):
            queue, losses = sorted(choices, key=lambda part: rises.get(part, 0.0)), dict[Any, float]()
            size = GROUP if rises else len(queue)
            while queue and (not losses or min(rises[part] for part in losses) > rises[queue[0]]):
                group, queue = queue[:size], queue[size:]
                values = divergences(net, [choices[part][0] for part in group], batches, kind, reduce, kept)
                for part, value in zip(group, values, strict=True):
                    losses[part], rises[part] = value, (value - loss) / choices[part][1]
            best = min(losses, key=lambda part: rises[part])
            kept, loss, order = choices[best][0], losses[best], [*choices]
            place = order.index(best)
            rises |= dict.fromkeys(order[max(0, place - 1) : place + 2], -inf)
        return kept


@dataclass(frozen=True)
class BlockLosses(Losses):
    """The blocks whose removal, one after the other, changes the model's answers the least.

    Attributes:
        counts: name of each list of blocks -> how many are kept.
    """

    counts: Mapping[str, int]

    def choices(self, net: Model, kept: Kept) -> dict[Any, tuple[Kept, int]]:
        """Return the other blocks by block of the lists that have too many; blocks count alike."""
        return {
            (path, number): (kept | {path: [other for other in numbers if other != number]}, 1)
            for path, numbers in kept.items()
            if len(numbers) > self.counts[path]
            for number in numbers[holds_first(net) :]
        }


@dataclass(frozen=True)
class SubLayerLosses(Losses):
    """The sub-layers whose removal, one after the other, changes the model's answers the least per removed weight.

    Attributes:
        density: share of the weights of all sub-layers that may be left.
    """

    density: float

    def begin(self, net: Model) -> Kept:
        """Return True for all sub-layers."""
        return kept_sublayers(net, [True] * len(sublayers(net, gated=False)))

    def choices(self, net: Model, kept: Kept) -> dict[Any, tuple[Kept, int]]:
        """Return the other sub-layers by sub-layer; one stays, of a decoder a self-attention."""
        parts, flags = sublayers(net, gated=False), flags_of(kept)
        weights, left = [part.weights(net) for part in parts], [i for i, flag in enumerate(flags) if flag]
        if sum(weights[i] for i in left) <= self.density * sum(weights) + 1e-6:
            return {}
        held = [i for i in left if parts[i].cached] or left
        without = {i: [flag and i != other for other, flag in enumerate(flags)] for i in left if held != [i]}
        return {i: (kept_sublayers(net, those), weights[i]) for i, those in without.items()}

    def first(self, net: Model) -> Kept:
        """Return the sub-layers that are left, no less than the density, if networks go first; for sizes beforehand.

        No other choice has more FLOPs, as attentions have the most for a weight.
        """
        parts = sublayers(net, gated=False)
        weights = [part.weights(net) for part in parts]
        flags, spare = [True] * len(parts), (1 - self.density) * sum(weights) + 1e-6
        for i in sorted(range(len(parts)), key=lambda i: (parts[i].kind != "ffn", -i)):
            if weights[i] <= spare:
                flags[i], spare = False, spare - weights[i]
        return kept_sublayers(net, flags)


def divergences(
    net: Model, choices: Sequence[Kept], batches: Any, kind: TaskType,
    reduce: Reduce = None, base: Kept | None = None,
) -> list[float]:  # fmt: skip
    """Return for each choice of kept parts the mean over examples of KL(model || model of these parts).

    For regression and vectors, half the squared difference of the outputs. A choice runs only the blocks behind the
    first one in which it differs from ``base``. The outputs of the others are kept, of one batch at a time.

    Args:
        net: with its task's head; it is not changed.
        choices: the kept parts.
        batches: of the examples, with ``index``, in the same order whenever they are iterated.
        reduce: in-place all-reduce (SUM) over processes with other examples.
        base: parts of which most choices have the first ones; None: all blocks.
    """
    base, outputs = BlockLosses({}).begin(net) if base is None else base, Outputs()
    first = _with_parts(net, base)
    has_all = len([*first.parameters()]) == len([*net.parameters()])
    for key in [(path, number) for path, numbers in base.items() for number in range(len(numbers))]:
        module_at(first, "{}.{}".format(*key), nn.Module).register_forward_hook(
            lambda _, __, output, key=key: outputs.update({key: output})
        )
    smaller = [_continued(_with_parts(net, kept), kept, base, outputs) for kept in choices]
    total = torch.zeros(len(choices) + 1, dtype=torch.float64)  # on the CPU, as some devices have no float64
    with frozen(net), torch.no_grad(), torch.autocast(net.device.type, enabled=False):
        for batch in track(batches, f"without 1 of {len(choices)} parts", len(batches)):
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


def _with_parts(net: Model, kept: Kept) -> Model:
    """Return a model of some parts of ``net``, in evaluation mode; it shares parameters with ``net``."""
    small = with_same_parameters(net).eval()
    remove_others(small, kept)
    return small
