"""Examples on their way through the blocks of a model, one block in memory; and statistics of the blocks on the way.

The hidden states between the blocks are on disk. The second moments of inputs need forwards only, so one walk over the
blocks gives them. K-FAC, the diagonal Fisher information and gradients of weights also need the gradients of the loss
by the states, which only the last block's output has at first. They take a walk back as well:

    forward, from the first block:    the states that every block reads go to disk, all of them
    head:                             the loss, and its gradient by the last block's output
    backward, from the last block:    every block once more forward, and back; its sums are made, the gradient
                                      by its input goes to disk in the place of that by its output

Each example goes three times through a block in place of two, and the weights are read twice. Labels are drawn by an
example's number, so the model in memory draws the same, and nothing is rounded that it would not round.

The states before a block are a folder, which is there when it is whole. A killed process continues with the block
whose output is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_compress.calibration.statistics import TOKENS, Batch, Collector, Statistic, real_rows, row_parts, watched
from lit_compress.models.block_net import Blocks, Ending
from lit_compress.models.sites import Site, find_sites
from lit_compress.numerics.sampled_labels import Labels
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import place_within
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import atomic_folder, remove
from lit_compress.utils.progress import track

Finish = Callable[[int, nn.Module, Any], None]


class Walk:
    """Some examples, and their states between the blocks of a model, in the model's dtype, on disk.

    Files are read and not mapped: mapped pages count as the process's memory.

    ``parts`` of the examples go through a block at once; ``folder`` is made with the first file.
    """

    def __init__(self, net: Blocks, task: TaskType, parts: Sequence[Batch], folder: Path) -> None:
        self.net, self.task, self.parts, self.folder, self.dtype = net, task, parts, folder, net.net.dtype

    def path(self, what: str, number: int) -> Path:
        """Return the folder of the ``states`` that block ``number`` reads, or of the ``gradients`` by them."""
        return self.folder / f"{what}-{number:05}"

    def write(self, what: str, number: int, tensors: Iterable[Tensor]) -> None:
        """Write a tensor for every part into a folder, which is there when all are."""
        with atomic_folder(self.path(what, number)) as temporary:
            for i, tensor in enumerate(tensors):
                torch.save(tensor.detach().to("cpu", self.dtype).clone(), temporary / str(i))

    def stored(self, what: str, number: int, order: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Yield the tensors of a folder for the parts in ``order``, by default all."""
        return (torch.load(self.path(what, number) / str(i)) for i in order or range(len(self.parts)))

    def states(self, number: int, order: Sequence[int] | None = None) -> Iterator[Tensor | None]:
        """Yield the input of block ``number`` for the parts in ``order``, by default all; None for the first block."""
        if number == 0:
            yield from (None for _ in (self.parts if order is None else order))
        else:
            yield from self.stored("states", number, order)

    def last(self) -> Iterator[Tensor]:
        """Yield the last block's output, part by part."""
        return self.stored("states", len(self.net))

    def step(self, number: int, rows: Batch, hidden: Tensor | None, other: nn.Module | None = None) -> Tensor:
        """Return what block ``number``, which is in memory, or another one in its place, makes of its input."""
        return self.net.step(number, self.task.inputs(self.net.net, rows), hidden, other)

    def pairs(self, number: int, order: Sequence[int] | None = None) -> Iterator[tuple[Batch, Tensor | None]]:
        """Yield the examples with the input of block ``number``, for the parts in ``order``, by default all."""
        parts = self.parts if order is None else [self.parts[i] for i in order]
        rows = ({name: column.to(self.net.device) for name, column in part.items()} for part in parts)
        return zip(rows, self.states(number, order), strict=True)

    def forward(self, number: int, outputs: Iterable[Tensor] | None = None) -> None:
        """Write the outputs of block ``number``, which is in memory, part by part; None: they are computed here."""
        with torch.no_grad():
            self.write("states", number + 1, outputs or (self.step(number, *pair) for pair in self.pairs(number)))

    def reach(self, number: int, keep: bool = False) -> None:
        """Make the states of block ``number``'s input, from the nearest one before; ``keep`` those between."""
        first = max((i for i in range(1, number + 1) if self.path("states", i).is_dir()), default=0)
        todo: Iterable[int] = range(first, number)
        for i in track(todo, "forward by blocks", number - first) if number - first > 1 else todo:
            with self.net.block(i):
                self.forward(i)
            if not keep:
                remove(self.path("states", i))


class BlockStatistics:
    """Collects a statistic of one block after the other; ``shapes`` is the whole model, without values."""

    def __init__(self, walk: Walk, shapes: Any, statistic: Statistic) -> None:
        self.walk, self.shapes, self.statistic = walk, shapes, statistic
        names = set(statistic.names(shapes))
        wanted = [site for site in find_sites(shapes) if site.name in names]
        self.sites: list[dict[str, Site]] = [
            {site.name: site for site in wanted if site.name.startswith(f"{name}.")} for name in walk.net.names
        ]

    def bytes(self) -> int:
        """Return the largest number of bytes that the sums of one block take."""
        return max((self.statistic.bytes(self.shapes, list(sites)) for sites in self.sites), default=0)

    def collect(self, numbers: Iterable[int], finish: Finish) -> None:
        """Collect the statistic of the blocks ``numbers``, rising, one at a time; those without sites are left out.

        ``finish`` is called with the number of a block, the block and the result at its sites.
        """
        todo = [i for i in numbers if self.sites[i]]
        title = f"{self.statistic.title} by blocks"
        if self.statistic.labels is None:
            for i in track(todo, title, len(todo)):
                self._inputs(i, finish)
        elif todo:
            last = self._first_gradients()
            for i in track(range(last - 1, todo[0] - 1, -1), title, last - todo[0]):
                self._both(i, finish if i in todo else None)

    def _inputs(self, number: int, finish: Finish) -> None:
        """Sum the inputs of a block's sites while it gives the next one's."""
        walk, sums = self.walk, self._sums(number)
        walk.reach(number)

        def outputs(block: nn.Module) -> Iterator[Tensor]:
            for rows, hidden in walk.pairs(number):
                with self._watched(number, block, rows, sums):
                    output = walk.step(number, rows, hidden)
                yield output

        with walk.net.block(number) as block:
            walk.forward(number, outputs(block))
            finish(number, block, sums.result())
        remove(walk.path("states", number))

    def _both(self, number: int, finish: Finish | None) -> None:
        """Put every part through a block and back, sum for ``finish``, and then write the gradient before it."""
        walk, sums = self.walk, self._sums(number) if finish else None

        def gradients(block: nn.Module) -> Iterator[Tensor]:
            after = walk.stored("gradients", number + 1)
            for (rows, hidden), gradients in zip(walk.pairs(number), after, strict=True):
                hidden = None if hidden is None else hidden.to(walk.net.device, torch.float32).requires_grad_()
                with self._watched(number, block, rows, sums):
                    output = walk.step(number, rows, hidden)
                    output.backward(gradients.to(output))
                if hidden is not None:
                    assert hidden.grad is not None
                    yield hidden.grad
            if finish is not None and sums is not None:
                finish(number, block, sums.result())

        with walk.net.block(number) as block, torch.enable_grad():
            walk.write("gradients", number, gradients(block))
        for what in ("gradients", "states"):
            remove(walk.path(what, number + 1))

    def _first_gradients(self) -> int:
        """Return before which block the gradients of the loss are on disk, the nearest to the first; make the last."""
        walk, count = self.walk, len(self.walk.net)
        for number in range(count + 1):
            if walk.path("gradients", number).is_dir():
                return number
        walk.reach(count, keep=True)

        def gradients() -> Iterator[Tensor]:
            for rows, states in walk.pairs(count):
                assert states is not None
                hidden = states.to(walk.net.device, torch.float32).requires_grad_()
                ending: Any = Ending(walk.net, iter([hidden]))
                logits = walk.task.logits(walk.task.run(ending, rows), rows)
                yield torch.autograd.grad(self.statistic.loss(walk.task, logits, rows), hidden)[0]

        with torch.enable_grad():
            walk.write("gradients", count, gradients())
        return count

    def _sums(self, number: int) -> Collector:
        names = list(self.sites[number])
        size = self.statistic.bytes(self.shapes, names)
        device = place_within(self.walk.net.device, size, "calibration: sums of a block")
        return self.statistic.collector(self.shapes, names, device)

    @contextmanager
    def _watched(self, number: int, block: nn.Module, rows: Batch, sums: Collector | None) -> Iterator[None]:
        """Let every use of a block's sites add to ``sums``, as in the model in memory."""
        if sums is None:
            yield
            return
        sums.examples += len(rows["index"])
        masks, start = self.walk.task.masks(rows), f"{self.walk.net.names[number]}."
        with watched(block, sums, self.sites[number], masks, len(rows["index"]), start=start):
            yield
        sums.end()


def calibration_parts(
    task: TaskType, batches: Iterable[Batch], labels: Labels | Literal["true"] | None
) -> list[Batch]:  # fmt: skip
    """Return the examples in the parts in which they go through a model in memory, on the CPU.

    Raises:
        UserError: there are none, or labels are missing.
    """
    cpu = torch.device("cpu")
    parts = [part for batch in batches for part in row_parts(task, real_rows(task, batch, cpu, labels), TOKENS)]
    if not parts:
        raise UserError("calibration: there are no examples; give at least 1")
    return parts
