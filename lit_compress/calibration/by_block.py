"""Calibration with one block of a model in memory: the sums of kronecker.py, fisher.py and gradients.py.

The second moments of the inputs need forwards only. One sweep over the blocks gives them: every block reads the states
that the one before left on disk. K-FAC, the diagonal Fisher information and gradients of weights also need the loss
gradients by states, which only the last block's output has at first. So they take two sweeps:

    forward, from the first block:    the states that every block reads go to disk, all of them
    head:                             the loss, and its gradient by the last block's output
    backward, from the last block:    every block once more forward, and back; its sums are made, the gradient
                                      by its input goes to disk in the place of that by its output

Each example goes three times through a block in place of two, and the weights are read twice. Labels are drawn by an
example's number, so both ways draw the same. With states in float32 nothing is rounded that the model in memory would
not round; in bfloat16 they take half the disk, and the moments are computed from rounded states.

Every finished part is a file, so a killed process continues with its block; missing files are made again from the
nearest ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.block_states import StateShape, stored, written
from lit_compress.calibration.statistics import TOKENS, Collector, Statistic
from lit_compress.calibration.uses import Batch, hooked, mask_of, real_rows, row_parts, token_places
from lit_compress.models.block_net import Blocks, Ending
from lit_compress.models.sites import Site, find_sites
from lit_compress.numerics.sampled_labels import Labels
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import place_within
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

Finish = Callable[[int, nn.Module, Any], None]


class Sweeps:
    """The states of some examples between the blocks of a model, on disk.

    Args:
        net: whose blocks run.
        task: gives inputs and logits.
        parts: of the examples, as many as go through a block at once.
        folder: for the files; made with the first one.
        dtype: of the files.
    """

    def __init__(self, net: Blocks, task: TaskType, parts: Sequence[Batch], folder: Path, dtype: torch.dtype) -> None:
        self.net, self.task, self.parts, self.folder, self.dtype = net, task, parts, folder, dtype
        width = int(net.net.config.hidden_size)
        self.shapes: list[StateShape] = [(*self.inputs(rows)["input_ids"].shape, width) for rows in parts]

    def path(self, what: str, number: int) -> Path:
        """Return the file of the ``states`` that block ``number`` reads, or of the ``gradients`` by them."""
        return self.folder / f"{what}-{number:05}"

    def numbers(self) -> int:
        """Return how many numbers the states before one block are."""
        return sum(map(prod, self.shapes))

    def states(self, number: int, order: Sequence[int] | None = None) -> Iterator[Tensor | None]:
        """Yield the input of block ``number``, part by part; None for the first, whose input the embeddings give.

        ``order`` has the numbers of the parts; None: all, from the first.
        """
        if number == 0 or not self.parts:
            yield from (None for _ in (self.parts if order is None else order))
            return
        path, each = self.path("states", number), torch.empty(0, dtype=self.dtype).element_size()
        tokens = [shape[:-1] for shape in self.shapes]
        width = path.stat().st_size // (each * sum(map(prod, tokens)))  # of sliced models every block has its own
        yield from (copies[0] for copies in stored(path, self.dtype, [(*shape, width) for shape in tokens], order))

    def last(self) -> Iterator[Tensor]:
        """Yield the last block's output, part by part."""
        for states in self.states(len(self.net)):
            assert states is not None
            yield states

    def rows(self, order: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield the examples, where the model is; of the parts in ``order``, by default all."""
        parts = self.parts if order is None else [self.parts[i] for i in order]
        return ({name: column.to(self.net.device) for name, column in rows.items()} for rows in parts)

    def inputs(self, rows: Batch) -> Batch:
        """Return the model's inputs of them."""
        return self.task.inputs(self.net.net, rows)

    def reach(self, number: int, keep: bool, what: str = "forward") -> None:
        """Make the file of block ``number``'s input, from the nearest one before; ``keep`` the files between."""
        first = max((i for i in range(1, number + 1) if self.path("states", i).is_file()), default=0)
        several = number - first > 1
        for i in track(range(first, number), f"{what} by blocks", number - first) if several else range(first, number):
            with self.net.block(i), torch.no_grad():
                self.forward(i, lambda rows, hidden, i=i: self.net.step(i, self.inputs(rows), hidden))  # type: ignore
            if not keep:
                self.drop("states", i)

    def forward(self, number: int, step: Callable[[Batch, Tensor | None], Tensor]) -> None:
        """Write the output of block ``number`` for every part by ``step``."""
        with written(self.path("states", number + 1), self.dtype) as add:
            for rows, hidden in zip(self.rows(), self.states(number), strict=True):
                add(step(rows, hidden))

    def drop(self, what: str, number: int) -> None:
        """Remove a file."""
        self.path(what, number).unlink(missing_ok=True)


class BlockStatistics:
    """Collects a statistic of one block after the other.

    Args:
        sweeps: over the calibration examples.
        shapes: the whole model, without values.
        statistic: the collected sums; per example, not per batch.
    """

    def __init__(self, sweeps: Sweeps, shapes: Any, statistic: Statistic) -> None:
        self.sweeps, self.shapes, self.statistic = sweeps, shapes, statistic
        names = set(statistic.names(shapes))
        wanted = [site for site in find_sites(shapes) if site.name in names]
        self.sites: list[dict[str, Site]] = [
            {site.name: site for site in wanted if site.name.startswith(f"{name}.")} for name in sweeps.net.names
        ]

    def bytes(self) -> int:
        """Return the largest number of bytes that the sums of one block take."""
        return max((self.statistic.bytes(self.shapes, list(sites)) for sites in self.sites), default=0)

    def collect(self, done: Callable[[int], bool], finish: Finish) -> None:
        """Collect the statistic of every block that has sites, one at a time.

        Args:
            done: says of a block's number that nothing is to be done for it.
            finish: is called with the number of a block, the block and the result at its sites.
        """
        count = len(self.sweeps.net)
        todo = [i for i in range(count) if self.sites[i] and not done(i)]
        if not todo:
            return
        forwards, title = self.statistic.labels is None, f"{self.statistic.title} by blocks"
        for i in track(todo if forwards else todo[::-1], title, len(todo)):
            if forwards:
                self._inputs(i, finish)
            else:
                self._reach_gradients(i + 1)
                self._both(i, finish)

    def _inputs(self, number: int, finish: Finish) -> None:
        """Sum the inputs of a block's sites while it gives the next one's."""
        self.sweeps.reach(number, keep=False)
        net, sums = self.sweeps.net, self._sums(number)
        with net.block(number) as block:

            def step(rows: Batch, hidden: Tensor | None) -> Tensor:
                with torch.no_grad(), self._watched(number, block, rows, sums):
                    return net.step(number, self.sweeps.inputs(rows), hidden)

            self.sweeps.forward(number, step)
            with net.only_block():
                finish(number, block, sums.result())
        self.sweeps.drop("states", number)

    def _both(self, number: int, finish: Finish | None) -> None:
        """Put every part through a block and back, sum the moments for ``finish``, and write the gradient before it."""
        self.sweeps.reach(number, keep=True)
        net, sums = self.sweeps.net, self._sums(number) if finish else None
        sweeps = self.sweeps
        with net.block(number) as block, torch.enable_grad():
            after = stored(sweeps.path("gradients", number + 1), sweeps.dtype, sweeps.shapes)
            with written(sweeps.path("gradients", number), sweeps.dtype) as add:
                for rows, hidden, gradients in zip(sweeps.rows(), sweeps.states(number), after, strict=True):
                    hidden = None if hidden is None else hidden.to(net.device, torch.float32).requires_grad_()
                    with self._watched(number, block, rows, sums):
                        output = net.step(number, sweeps.inputs(rows), hidden)
                        before = _back(output, hidden, gradients.to(output))
                    if before is not None:
                        add(before)
            if finish is not None and sums is not None:
                with net.only_block():
                    finish(number, block, sums.result())
        for what in ("gradients", "states"):
            sweeps.drop(what, number + 1)

    def _reach_gradients(self, number: int) -> None:
        """Make the file of the gradients by block ``number``'s input, from the nearest later one, or the head."""
        sweeps, count = self.sweeps, len(self.sweeps.net)
        if sweeps.path("gradients", number).is_file():
            return
        there = [i for i in range(number + 1, count + 1) if sweeps.path("gradients", i).is_file()]
        if not there:
            sweeps.reach(count, keep=True)
            self._head()
        for i in range(min(there, default=count) - 1, number - 1, -1):
            self._both(i, None)

    def _head(self) -> None:
        """Write the gradients of the loss by the last block's output."""
        sweeps, task = self.sweeps, self.sweeps.task
        with written(sweeps.path("gradients", len(sweeps.net)), sweeps.dtype) as add, torch.enable_grad():
            for rows, states in zip(sweeps.rows(), sweeps.last(), strict=True):
                hidden = states.to(sweeps.net.device, torch.float32).requires_grad_()
                ending: Any = Ending(sweeps.net, lambda hidden=hidden: iter([hidden]))  # type: ignore[misc]
                logits = task.logits(task.run(ending, rows), rows)
                losses = self.statistic.losses(task, logits, rows, len(rows["index"]))
                more = len(losses) > 1
                add(torch.cat([torch.autograd.grad(loss, hidden, retain_graph=more)[0][None] for loss in losses]))

    def _sums(self, number: int) -> Collector:
        names = list(self.sites[number])
        size = self.statistic.bytes(self.shapes, names)
        device = place_within(self.sweeps.net.device, size, "calibration: sums of a block")
        return self.statistic.collector(self.shapes, names, device)

    @contextmanager
    def _watched(self, number: int, block: nn.Module, rows: Batch, sums: Collector | None) -> Iterator[None]:
        """Let every use of a block's sites add to ``sums``, as in the model in memory."""
        if sums is None:
            yield
            return
        where: Any = self.sweeps.task.masks(rows)
        if sums.by_token:
            where = [token_places(mask) for mask in where]
        sites, start, groups = self.sites[number], f"{self.sweeps.net.names[number]}.", len(rows["index"])
        sums.examples += groups

        def on_forward(path: str, x: Tensor, output: Tensor) -> None:
            sums.use(start + path, x, output, mask_of(sites[start + path], where), groups)

        with hooked(block, [name.removeprefix(start) for name in sites], on_forward):
            yield
        sums.end()


def _back(output: Tensor, hidden: Tensor | None, gradients: Tensor) -> Tensor | None:
    """Go back from ``output`` with every one of ``gradients`` [copies, ...]; return those by ``hidden``, stacked."""
    gradients_before = []
    for i, gradient in enumerate(gradients):
        if hidden is not None:
            hidden.grad = None
        output.backward(gradient, retain_graph=i + 1 < len(gradients))
        if hidden is not None:
            assert hidden.grad is not None
            gradients_before.append(hidden.grad)
    return torch.stack(gradients_before) if gradients_before else None


def calibration_parts(task: TaskType, batches: Iterable[Batch], labels: Labels | None) -> list[Batch]:
    """Return the examples in the parts in which they go through a model in memory, on the CPU.

    Raises:
        UserError: there are none, or labels are missing.
    """
    cpu = torch.device("cpu")
    parts = [part for batch in batches for part in row_parts(task, real_rows(task, batch, cpu, labels), TOKENS)]
    if not parts:
        raise UserError("calibration: there are no examples; give at least 1")
    return parts


def check_disk(folder: Path, needed: int, option: str = "--by_block") -> None:
    """Refuse work whose files do not fit on the disk of ``folder``, which may hold some of them.

    Raises:
        UserError: says how much is needed.
    """
    needed -= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())  # of a process that was killed
    if needed > (free := shutil.disk_usage(folder).free):
        half = ", or --by_block bfloat16, need less" if option == "--by_block" else " need less"
        raise UserError(
            f"{option}: its files take {needed / 1e9:.1f} GB, '{folder}' has {free / 1e9:.1f} GB free; fewer "
            f"calibration_examples{half}"
        )
