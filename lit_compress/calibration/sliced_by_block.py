"""Principal axes of the residual stream block by block, for norms before the sub-layers (sliced_stream.py).

The model is in memory, or one block of it at a time. A block has two sites, the inputs of its two norms. Each gets its
axes from forwards through the block up to its norm, with the sites before it sliced. Then the sliced block computes the
next one's input, which is written to disk.

Every finished part is a file, so a killed process continues with its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lit_compress.calibration.by_block import Sweeps
from lit_compress.calibration.grams import Gram
from lit_compress.calibration.sliced_stream import stream_gram
from lit_compress.calibration.uses import Batch, token_places
from lit_compress.layers import StreamBlock
from lit_compress.models.residual_stream import ResidualStream, StreamSubLayer
from lit_compress.numerics.pca import centred_axes, principal_axes
from lit_compress.utils.progress import track

Axes = dict[int, Tensor]  # by number of the site


class _Slice(nn.Module):
    """Has no parameters; keeps the directions of ``projector`` [d, d] of its input."""

    def __init__(self, projector: Tensor) -> None:
        super().__init__()
        self._held = (projector,)  # in a tuple, so that it is no part of the block's state

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        return x @ self._held[0]


class BlockAxes:
    """Collects the axes of the sites of one block after the other.

    Args:
        sweeps: over the calibration examples.
        stream: of the whole dense model; its norms are before the sub-layers.
        widths: number of directions that every site keeps.
        centred: whether the norms take a mean away.
        read: function of the number of a block that is finished; it returns the axes of its sites.
        reduce: in-place all-reduce (SUM) over ranks with other examples.
        agree: function that returns on every rank its argument's result on the first.
    """

    def __init__(
        self, sweeps: Sweeps, stream: ResidualStream, widths: Sequence[int], centred: bool,
        read: Callable[[int], Axes] = lambda number: {}, reduce: Callable[[Tensor], object] | None = None,
        agree: Callable[[Callable[[], Tensor]], Tensor] = lambda make: make(),
    ) -> None:  # fmt: skip
        self.sweeps, self.stream, self.widths = sweeps, stream, widths
        self.read, self.reduce, self.agree = read, reduce, agree
        self.find = centred_axes if centred else principal_axes
        self.size = int(sweeps.net.net.config.hidden_size)

    def sublayers(self, number: int) -> list[StreamSubLayer]:
        """Return the sub-layers of a block."""
        return [sublayer for sublayer in self.stream.sublayers if sublayer.host == self.sweeps.net.names[number]]

    def bytes(self) -> int:
        """Return how many bytes the sum of a site, the axes of a block and its projectors take."""
        return 8 * sum(Gram.numbers(self.size)) + (2 * 8 + 2 * 4) * self.size**2

    def collect(self, done: Callable[[int], bool], finish: Callable[[int, nn.Module, Axes], None]) -> None:
        """Collect the axes of all blocks.

        Args:
            done: says of a block's number that its axes can be read.
            finish: is called with the number of a block, the block and the axes U [d, d], float64, of its sites.

        Raises:
            UserError: a hidden state is inf or NaN.
        """
        sweeps, count = self.sweeps, len(self.sweeps.net)
        if all(map(done, range(count))):
            return
        first = max((i for i in range(1, count) if sweeps.path("states", i).is_file()), default=0)
        for i in track(range(first, count), "principal axes by blocks", count - first):
            with sweeps.net.block(i) as block, torch.no_grad():
                if done(i):
                    axes = self.read(i)
                else:
                    axes = self._axes(i, block)
                    finish(i, block, axes)
                if i + 1 < count:
                    with self._sliced(i, block, axes):
                        sweeps.forward(i, lambda rows, hidden, i=i: self._step(i, rows, hidden))  # type: ignore[misc]
            sweeps.drop("states", i)

    def _step(self, number: int, rows: Batch, hidden: Tensor | None) -> Tensor:
        return self.sweeps.net.step(number, self.sweeps.inputs(rows), hidden)

    def _axes(self, number: int, block: nn.Module) -> Axes:
        """Return the axes of a block's sites, each behind the slices before it."""
        axes: Axes = {}
        for sublayer in self.sublayers(number):
            with self._sliced(number, block, axes):
                gram = self._gram(number, block, sublayer)
            axes[sublayer.reads] = self._found(gram)
        return axes

    def _found(self, gram: Gram) -> Tensor:
        return self.agree(lambda: self.find(gram.whole())[0])

    def _gram(self, number: int, block: nn.Module, sublayer: StreamSubLayer) -> Gram:
        """Return the sum of x x^T over the tokens that reach the norms of a sub-layer's site."""
        sweeps = self.sweeps
        ends = len(self.stream.sites[sublayer.reads].norms) > 1  # the last norm of the model reads what the block gives
        passes = (
            (token_places(sweeps.task.masks(rows)[0]), partial(self._step, number, rows, hidden))
            for rows, hidden in zip(sweeps.rows(), sweeps.states(number), strict=True)
        )
        norm = block.get_submodule(_inside(sublayer.norm, sublayer))
        return stream_gram([norm], self.size, sweeps.net.device, passes, stop=not ends, reduce=self.reduce)

    @contextmanager
    def _sliced(self, number: int, block: nn.Module, axes: Axes) -> Iterator[None]:
        """Let norms and residual path of the sites in ``axes`` have only the directions that stay."""
        kind, handles, turns = type(block), [], []
        StreamBlock.adopt(block)
        try:
            for sublayer in self.sublayers(number):
                if sublayer.reads not in axes or self.widths[sublayer.reads] == self.size:
                    continue
                kept = axes[sublayer.reads][:, : self.widths[sublayer.reads]]
                part = _Slice((kept @ kept.mT).to(self.sweeps.net.device, self.sweeps.net.net.dtype))
                norm = block.get_submodule(_inside(sublayer.norm, sublayer))
                handles.append(norm.register_forward_pre_hook(lambda _, args, part=part: (part(args[0]),)))
                if sublayer in self.stream.group_ends:
                    turns.append(_inside(sublayer.junction, sublayer))
                    setattr(block, turns[-1], part)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in turns:
                delattr(block, name)
            block.__class__ = kind


def _inside(name: str, sublayer: StreamSubLayer) -> str:
    """Return the name of a module in its block."""
    return name.removeprefix(f"{sublayer.host}.")
