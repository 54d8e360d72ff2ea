"""How far a model without some of its blocks is from the whole model, on examples; and which blocks to remove."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_compress.calibration.statistics import OfModel, Reduce
from lit_compress.calibration.uses import frozen, real_rows
from lit_compress.models.shorten import holds_first, shorten, stack_lengths
from lit_compress.models.sites import module_at
from lit_compress.utils.progress import track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_compress.tasks import TaskType

Kept = dict[str, list[int]]  # name of a list of blocks -> numbers of the kept blocks, rising
Outputs = dict[tuple[str, int], Any]  # of a block, by the name of its list and its number


@dataclass(frozen=True)
class BlockLosses(OfModel):
    """The blocks whose removal, one after the other, changes the model's answers the least.

    Each time the block is removed without which :func:`divergences` is smallest.

    Attributes:
        counts: name of each list of blocks -> how many are kept.
    """

    counts: Mapping[str, int]

    def answer(self, net: PreTrainedModel, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
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
    net: PreTrainedModel, choices: Sequence[Kept], batches: Any, kind: TaskType,
    reduce: Reduce = None, base: Kept | None = None,
) -> list[float]:  # fmt: skip
    """Return for each choice of kept blocks the mean over examples of KL(model || model of these blocks).

    For regression and vectors, half the squared difference of the outputs. A choice runs only the blocks behind the
    first one in which it differs from ``base``: the outputs of the others are kept, of one batch at a time.

    Args:
        net: with its task's head; it is not changed.
        choices: the kept blocks.
        batches: of the examples, with ``index``, in the same order whenever they are iterated.
        kind: of the task.
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


def _continued(small: PreTrainedModel, kept: Kept, base: Kept, outputs: Outputs) -> PreTrainedModel:
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


def _with_blocks(net: PreTrainedModel, kept: Kept) -> PreTrainedModel:
    """Return a model of some blocks of ``net``, in evaluation mode; it shares parameters and buffers with ``net``."""
    shared = {id(value): value for values in (net.parameters(), net.buffers()) for value in values}
    small = copy.deepcopy(net, shared).eval()
    shorten(small, kept)
    return small
