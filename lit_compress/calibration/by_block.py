"""Calibration of a net of which one block is in memory: the sums of kronecker.py, fisher.py and gradients.py.

The second moments of the inputs need forwards only. One sweep over the blocks gives them: every block reads the states
that the one before left on disk. K-FAC, the diagonal Fisher information and gradients of weights need those of the loss
by states as well, which only the last block's output has at first. So they take two sweeps:

    forward, from the first block:    the states that every block reads go to disk, all of them
    head:                             the loss, and its gradient by the last block's output
    backward, from the last block:    every block once more forward, and back; its sums are made, the gradient
                                      by its input goes to disk in the place of that by its output

Each example goes three times through a block in place of two, and the weights are read twice. Labels are drawn by an
example's number, so both ways draw the same. With states in float32 nothing is rounded that the net in memory would
not round; in bfloat16 they take half the disk, and the moments are those of rounded states.

What is finished is a file, so a killed process goes on with the block it was at; files that are missing are made anew
from the nearest ones there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lit_compress.calibration.block_states import Shape, stored, written
from lit_compress.calibration.fisher import Fisher, Squares
from lit_compress.calibration.gradients import MeanGradient, mean_gradient
from lit_compress.calibration.grams import Gram
from lit_compress.calibration.kronecker import (
    KroneckerFactors,
    Rows,
    _hooked,
    _mask_of,
    _parts,
    _places,
    _real_rows,
    _Sums,
    _tokens,
)
from lit_compress.models.block_net import BlockNet, Ending
from lit_compress.models.sites import Site, find_sites, shared_inputs
from lit_compress.numerics.losses import example_losses
from lit_compress.numerics.sampled_labels import Labels, fisher_losses
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import place_within
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import track

Found = dict[str, KroneckerFactors] | dict[str, Fisher] | dict[str, MeanGradient]
What = Literal[
    "moments", "fisher", "gradients", "squares"
]  # squares: the gradients, and the squares of every example's
Finish = Callable[[int, nn.Module, Any], None]


class Sweeps:
    """The states of some examples between the blocks of a net, on disk.

    Args:
        net: whose blocks run.
        task: gives inputs and logits.
        parts: of the examples, as many as go through a block at once.
        folder: for the files; made with the first one.
        dtype: of the files.
    """

    def __init__(self, net: BlockNet, task: TaskType, parts: Sequence[Rows], folder: Path, dtype: torch.dtype) -> None:
        self.net, self.task, self.parts, self.folder, self.dtype = net, task, parts, folder, dtype
        width = int(net.net.config.hidden_size)
        self.shapes: list[Shape] = [(*self.inputs(rows)["input_ids"].shape, width) for rows in parts]

    def path(self, what: str, number: int) -> Path:
        """Return the file of the ``states`` that block ``number`` reads, or of the ``gradients`` by them."""
        return self.folder / f"{what}-{number:05}"

    def numbers(self) -> int:
        """Return how many numbers the states before one block are."""
        return sum(map(prod, self.shapes))

    def states(self, number: int) -> Iterator[Tensor | None]:
        """Yield what block ``number`` reads, part by part; None for the first, whose input the embeddings give."""
        if number == 0:
            yield from (None for _ in self.parts)
            return
        path, each = self.path("states", number), torch.empty(0, dtype=self.dtype).element_size()
        tokens = [shape[:-1] for shape in self.shapes]
        width = path.stat().st_size // (each * sum(map(prod, tokens)))  # of sliced nets every block has its own
        yield from (copies[0] for copies in stored(path, self.dtype, [(*shape, width) for shape in tokens]))

    def last(self) -> Iterator[Tensor]:
        """Yield what the last block gave, part by part."""
        for states in self.states(len(self.net)):
            assert states is not None
            yield states

    def rows(self) -> Iterator[Rows]:
        """Yield the examples, where the net is."""
        return ({name: column.to(self.net.device) for name, column in rows.items()} for rows in self.parts)

    def inputs(self, rows: Rows) -> Rows:
        """Return what the net reads of them."""
        return self.task.inputs(self.net.net, rows)

    def reach(self, number: int, keep: bool, what: str = "forward") -> None:
        """Make the file of what block ``number`` reads, from the nearest one before; ``keep`` those between."""
        first = max((i for i in range(1, number + 1) if self.path("states", i).is_file()), default=0)
        for i in track(range(first, number), f"{what} by blocks", number - first):
            with self.net.block(i), torch.no_grad():
                self.forward(i, lambda rows, hidden, i=i: self.net.step(i, self.inputs(rows), hidden))  # type: ignore
            if not keep:
                self.drop("states", i)

    def forward(self, number: int, step: Callable[[Rows, Tensor | None], Tensor]) -> None:
        """Write what block ``number`` makes of every part by ``step``."""
        with written(self.path("states", number + 1), self.dtype) as add:
            for rows, hidden in zip(self.rows(), self.states(number), strict=True):
                add(step(rows, hidden))

    def drop(self, what: str, number: int) -> None:
        """Remove a file."""
        self.path(what, number).unlink(missing_ok=True)


class _SumsOfBlock(Protocol):
    """What is summed over the uses of a block's sites."""

    def use(self, name: str, x: Tensor, output: Tensor, mask: Tensor, rows: int) -> None:
        """Take the inputs of a use of site ``name``, of so many examples, and watch for the gradient by its output."""

    def result(self) -> Found:
        """Return what was found, which alone has the sums afterwards."""


class _Moments:
    """Kronecker factors of a block; with ``gradients``, or of its inputs only."""

    def __init__(
        self, shapes: Any, sites: dict[str, Site], examples: int, gradients: bool, device: torch.device
    ) -> None:
        self.sums, self.gradients = _Sums(shapes, sites, torch.float32, device, gradients), gradients
        self.sums.examples = examples

    def use(self, name: str, x: Tensor, output: Tensor, mask: Tensor, rows: int) -> None:
        self.sums.add_inputs(name, _tokens(x.detach(), mask))
        if self.gradients:
            add = self.sums.outer[name].add
            output.requires_grad_().register_hook(lambda gradient: add(_tokens(gradient, mask)))

    def result(self) -> Found:
        found = self.sums.result()
        self.sums.grams.clear()
        self.sums.outer.clear()
        return found


class _Squares:
    """Diagonal Fisher information of a block, per example."""

    def __init__(self, shapes: Any, sites: dict[str, Site], examples: int) -> None:
        self.examples = examples
        self.sums = {name: Squares.empty(shapes.get_submodule(name).weight.shape) for name in sites}

    def use(self, name: str, x: Tensor, output: Tensor, mask: Tensor, rows: int) -> None:
        add, read = self.sums[name].add, x.detach().reshape(rows, -1, x.shape[-1])
        output.requires_grad_().register_hook(lambda g: add([(read, g.reshape(rows, -1, g.shape[-1]))]))

    def result(self) -> Found:
        return {name: sums.mean(name, float(self.examples)) for name, sums in self.sums.items()}


class _Gradients:
    """Mean gradients of a block's matrices; with ``squares`` also the means of the squares of every example's."""

    def __init__(self, shapes: Any, sites: dict[str, Site], examples: int, squares: bool) -> None:
        self.examples, sizes = examples, {name: shapes.get_submodule(name).weight.shape for name in sites}
        self.sums = {name: torch.zeros(size) for name, size in sizes.items()}
        self.squares = {name: torch.zeros(size) for name, size in sizes.items() if squares}

    def use(self, name: str, x: Tensor, output: Tensor, mask: Tensor, rows: int) -> None:
        read = x.detach().reshape(rows, -1, x.shape[-1])

        def add(gradient: Tensor) -> None:
            for one, inputs in zip(gradient.reshape(rows, -1, gradient.shape[-1]), read, strict=True):
                found = (one.mT @ inputs).cpu()
                self.sums[name] += found
                if name in self.squares:
                    self.squares[name] += found.square_()

        output.requires_grad_().register_hook(add)

    def result(self) -> Found:
        return {
            name: mean_gradient(name, total, self.squares.get(name), self.examples) for name, total in self.sums.items()
        }


class BlockMoments:
    """Collects the Kronecker factors, the Fisher information or the gradients of one block after the other.

    Args:
        sweeps: over the calibration examples.
        shapes: the whole net, without values.
        labels: of the gradients; None for the moments of inputs only.
        seed: of drawn labels.
        what: is collected; all but the moments are under labels ``true``, of vectors under ``drawn``.
        only: names of the sites whose moments are wanted; None for all.
    """

    def __init__(
        self, sweeps: Sweeps, shapes: Any, labels: Labels | None, seed: int, what: What = "moments",
        only: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self.sweeps, self.shapes, self.labels, self.seed, self.what = sweeps, shapes, labels, seed, what
        self.examples = sum(len(rows["index"]) for rows in sweeps.parts)
        wanted = [site for site in find_sites(shapes) if only is None or site.name in only]
        self.sites: list[dict[str, Site]] = [
            {site.name: site for site in wanted if site.name.startswith(f"{name}.")} for name in sweeps.net.names
        ]

    def bytes(self) -> int:
        """Return the largest number of bytes that the sums of one block take."""
        if self.what != "moments":
            shapes = ([self.shapes.get_submodule(name).weight.shape for name in sites] for sites in self.sites)
            each = {"fisher": lambda shape: 8 * sum(shape), "gradients": lambda shape: 4 * prod(shape),
                    "squares": lambda shape: 8 * prod(shape)}[self.what]  # fmt: skip
            return max((sum(map(each, of_block)) for of_block in shapes), default=0)
        return max((4 * sum(_numbers(self.shapes, sites, self.labels is not None)) for sites in self.sites), default=0)

    def collect(self, done: Callable[[int], bool], finish: Finish) -> None:
        """Collect the moments of every block that has sites, one at a time.

        Args:
            done: says of a block's number that nothing is to be done for it.
            finish: is called with the number of a block, the block and what was found of its sites.
        """
        count = len(self.sweeps.net)
        todo = [i for i in range(count) if self.sites[i] and not done(i)]
        if not todo:
            return
        if self.labels is None:
            for i in track(todo, self._what, len(todo)):
                self._inputs(i, finish)
            return
        for i in track(todo[::-1], self._what, len(todo)):
            self._reach_gradients(i + 1)
            self._both(i, finish)

    @property
    def _what(self) -> str:
        names = {"moments": "Kronecker factors", "fisher": "Fisher information"}
        return f"{names.get(self.what, 'gradients')} by blocks"

    def _inputs(self, number: int, finish: Finish) -> None:
        """Sum the inputs of a block's sites while it gives the next one's."""
        self.sweeps.reach(number, keep=False)
        net, sums = self.sweeps.net, self._sums(number)
        with net.block(number) as block:

            def step(rows: Rows, hidden: Tensor | None) -> Tensor:
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
                        found = _back(output, hidden, gradients.to(output))
                    if found is not None:
                        add(found)
            if finish is not None and sums is not None:
                with net.only_block():
                    finish(number, block, sums.result())
        for what in ("gradients", "states"):
            sweeps.drop(what, number + 1)

    def _reach_gradients(self, number: int) -> None:
        """Make the file of the gradients by what block ``number`` reads, from the nearest one behind, or the head."""
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
        """Write the gradients of the loss by what the last block gives."""
        sweeps, task = self.sweeps, self.sweeps.task
        with written(sweeps.path("gradients", len(sweeps.net)), sweeps.dtype) as add, torch.enable_grad():
            for rows, states in zip(sweeps.rows(), sweeps.last(), strict=True):
                hidden = states.to(sweeps.net.device, torch.float32).requires_grad_()
                ending: Any = Ending(sweeps.net, lambda hidden=hidden: iter([hidden]))  # type: ignore[misc]
                logits = task.logits(task.run(ending, rows), rows)
                losses = self._losses(logits, rows)
                more = len(losses) > 1
                add(torch.cat([torch.autograd.grad(loss, hidden, retain_graph=more)[0][None] for loss in losses]))

    def _losses(self, logits: Tensor, rows: Rows) -> list[Tensor]:
        """Return the losses whose gradients are wanted, one after the other."""
        task = self.sweeps.task
        if self.what != "moments" and task.loss != "vectors":
            return [example_losses(logits, rows["labels"], task.loss).sum() * (len(rows["index"]) / len(logits))]
        assert self.labels is not None
        return fisher_losses(
            logits, task.loss, self.labels, labels=rows.get("labels"), counted=task.counted(rows), index=rows["index"],
            seed=self.seed,
        )  # fmt: skip

    def _sums(self, number: int) -> _SumsOfBlock:
        if self.what == "fisher":
            return _Squares(self.shapes, self.sites[number], self.examples)
        if self.what != "moments":
            return _Gradients(self.shapes, self.sites[number], self.examples, self.what == "squares")
        gradients, sites = self.labels is not None, self.sites[number]
        size = 4 * sum(_numbers(self.shapes, sites, gradients))
        device = place_within(self.sweeps.net.device, size, "calibration: sums of a block")
        return _Moments(self.shapes, sites, self.examples, gradients, device)

    def _watched(self, number: int, block: nn.Module, rows: Rows, sums: _SumsOfBlock | None) -> Any:
        """Let every use of a block's sites add to ``sums``, as in the net in memory."""
        places = [_places(mask) for mask in self.sweeps.task.masks(rows)]
        sites = self.sites[number]
        start = f"{self.sweeps.net.names[number]}."

        def on_forward(path: str, x: Tensor, output: Tensor) -> None:
            if sums is not None:
                sums.use(start + path, x, output, _mask_of(sites[start + path], places), len(rows["index"]))

        return _hooked(block, [name.removeprefix(start) for name in sites], on_forward)


def _numbers(shapes: Any, sites: dict[str, Site], gradients: bool) -> Iterator[int]:
    """Yield how many numbers every sum of some sites has."""
    for group in shared_inputs(shapes):
        modules = [shapes.get_submodule(name) for name in group if name in sites]
        for size in [*(m.in_features for m in modules[:1]), *(m.out_features for m in modules if gradients)]:
            yield sum(Gram.numbers(size))


def _back(output: Tensor, hidden: Tensor | None, gradients: Tensor) -> Tensor | None:
    """Go back from ``output`` with every one of ``gradients`` [copies, ...]; return those by ``hidden``, stacked."""
    found = []
    for i, gradient in enumerate(gradients):
        if hidden is not None:
            hidden.grad = None
        output.backward(gradient, retain_graph=i + 1 < len(gradients))
        if hidden is not None:
            assert hidden.grad is not None
            found.append(hidden.grad)
    return torch.stack(found) if found else None


def calibration_parts(task: TaskType, batches: Iterable[Rows], labels: Labels | None) -> list[Rows]:
    """Return the examples in the parts in which they go through a net in memory, on the CPU.

    Raises:
        UserError: there are none, or labels are missing.
    """
    cpu = torch.device("cpu")
    found = [part for batch in batches for part in _parts(task, _real_rows(task, batch, cpu, labels))]
    if not found:
        raise UserError("calibration: there are no examples; give at least 1")
    return found


def check_disk(folder: Path, needed: int) -> None:
    """Refuse work whose files do not fit on the disk of ``folder``, which may hold some of them.

    Raises:
        UserError: says how much is needed.
    """
    needed -= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())  # of a process that was killed
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"--by_block: its files take {needed / 1e9:.1f} GB, '{folder}' has {free / 1e9:.1f} GB free; fewer "
            "calibration_examples, or --by_block bfloat16, need less"
        )
