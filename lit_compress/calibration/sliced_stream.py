"""Principal axes of the residual stream, site by site, each behind the slices of all sites before it (SliceGPT).

With U the axes of a site, and its first k kept, Q = U[:, :k], every reader of the site gets Q Q^T x in place of x: its
norms, and with norms before the sub-layers also the residual path. In these coordinates, the dense model's, a slice is
a hook, and nothing is turned before all axes are known.

Norms after the residual sum: every site has forwards of its own, from the first block up to it. Norms before the
sub-layers: the states before a block are on disk, behind all slices before it, and forwards are of one block (walk.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.moments import Gram
from lit_compress.calibration.statistics import OfModel, Reduce
from lit_compress.calibration.uses import Batch, Stop, frozen, hooked, real_rows, token_places, tokens_at
from lit_compress.calibration.walk import Walk, check_disk
from lit_compress.layers import StreamBlock
from lit_compress.models.architectures import get_architecture
from lit_compress.models.block_net import one_by_one
from lit_compress.models.residual_stream import ResidualStream, residual_stream
from lit_compress.numerics.pca import centred_axes, principal_axes
from lit_compress.tasks import TaskType
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note, track
from lit_compress.utils.sharding import from_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Passes = Iterable[tuple[Tensor, Callable[[], Any]]]  # places of the tokens that count, int64, and what does a forward


@dataclass(frozen=True)
class Axes(OfModel):
    """The axes U [d, d] of every site, by falling energy behind the slices before; by number, float64, on the CPU.

    Attributes:
        widths: number of directions k that every site keeps.
    """

    widths: Sequence[int]

    def answer(self, net: PreTrainedModel, batches: Any, kind: TaskType, reduce: Reduce) -> dict[Any, Any]:
        """Return the axes; a model with norms before the sub-layers is on the CPU afterwards.

        Raises:
            UserError: there are no examples, or a hidden state is inf or NaN.
        """
        stream, device = residual_stream(net), net.device
        find = principal_axes if get_architecture(net).rms else centred_axes  # other norms subtract a mean
        axes: list[Tensor] = []
        with ExitStack() as undo, torch.no_grad(), torch.autocast(device.type, enabled=False):
            undo.enter_context(frozen(net))
            passes: Callable[[int], Passes] = partial(_of_model, net, stream, batches, kind)
            blocks: dict[str, nn.Module] = {}
            if stream.pre_norm:
                walk = undo.enter_context(_walk(net, batches, kind))
                blocks = dict(zip(walk.net.names, walk.net.blocks, strict=True))
                passes = partial(_of_block, walk, stream)
                for block in blocks.values():
                    undo.callback(setattr, block, "__class__", type(block))
                    StreamBlock.adopt(block)
            modules = dict(net.named_modules()) | {
                f"{name}.{path}": module for name, block in blocks.items() for path, module in block.named_modules()
            }
            for i, site in track(list(enumerate(stream.sites)), "principal axes", len(stream.sites)):
                names = [name for name in site.norms if not blocks or name.startswith(f"{stream.sublayers[i].host}.")]
                own = {name: modules[name] for name in names}
                ends = len(own) < len(site.norms)  # the last norm of the model reads what the block gives
                gram = _gram(own, net.config.hidden_size, device, passes(i), not ends, reduce)
                axes.append(from_first(lambda gram=gram: find(gram.whole())[0]))  # type: ignore[misc]
                if self.widths[i] < len(axes[i]):
                    kept = axes[i][:, : self.widths[i]]
                    part = partial(torch.matmul, other=(kept @ kept.mT).to(device, net.dtype))
                    for name in site.norms:
                        hook = lambda _, args, part=part: (part(args[0]),)  # noqa: E731
                        undo.callback(modules[name].register_forward_pre_hook(hook).remove)
                    for sublayer in (sublayer for sublayer in stream.group_ends if sublayer.reads == i):
                        turn = sublayer.junction.removeprefix(f"{sublayer.host}.")
                        setattr(blocks[sublayer.host], turn, part)
                        undo.callback(delattr, blocks[sublayer.host], turn)
        return dict(enumerate(axes))


def _of_model(
    net: PreTrainedModel, stream: ResidualStream, batches: Iterable[Batch], task: TaskType, site: int
) -> Passes:
    """Yield the forwards of the whole model."""
    stack = list(dict.fromkeys(place.stack for place in stream.sites)).index(stream.sites[site].stack)
    for batch in batches:
        rows = real_rows(task, batch, net.device, None)
        if len(rows["index"]):
            yield token_places(task.masks(rows)[stack]), partial(task.run, net, rows)


def _of_block(walk: Walk, stream: ResidualStream, site: int) -> Passes:
    """Yield the forwards of the block of a site, behind the slices before it."""
    number = walk.net.names.index(stream.sublayers[site].host)
    walk.reach(number)
    with walk.net.block(number):
        for rows, hidden in zip(walk.rows(), walk.states(number), strict=True):
            yield token_places(walk.task.masks(rows)[0]), partial(walk.step, number, rows, hidden)


@contextmanager
def _walk(net: PreTrainedModel, batches: Iterable[Batch], task: TaskType) -> Iterator[Walk]:
    """Yield the examples before the first block of a model in memory, with a folder for their states."""
    rows = (real_rows(task, batch, torch.device("cpu"), None) for batch in batches)
    parts = [part for part in rows if len(part["index"])]
    with one_by_one(net, net.device) as blocks, tempfile.TemporaryDirectory() as folder:
        walk = Walk(blocks, task, parts, Path(folder))
        check_disk(Path(folder), 2 * walk.bytes(), "SliceGPT")
        yield walk


def _gram(
    norms: Mapping[str, nn.Module], size: int, device: torch.device, passes: Passes, stop: bool, reduce: Reduce
) -> Gram:
    """Return the sum of x x^T over the tokens that reach some norms; a note says if they are fewer than dimensions.

    ``norms`` are in the order of a forward, which stops at the last one if ``stop``; else its output is also read.
    """
    gram, count = Gram(size, torch.float64, place_of_sums(device)), torch.zeros(1, dtype=torch.int64, device=device)
    places, last = torch.zeros(0), next(reversed([*norms]), "")

    def read(name: str, x: Tensor, _: Tensor | None = None) -> None:
        taken = double(tokens_at(x, places))
        gram.add(taken)
        count.add_(len(taken))
        if stop and name == last:
            raise Stop

    with hooked(norms, read):
        for where, forward in passes:
            places = where
            with suppress(Stop):
                read("", forward())
    for total in (gram.flat, count) if reduce is not None else ():
        reduce(total)  # type: ignore[misc]
    if not count:
        raise UserError("calibration: there are no examples; give at least 1")
    if count < size:
        note(
            f"calibration: {int(count)} tokens are fewer than the {size} dimensions of hidden states; the axes of "
            "those without any are chosen at random"
        )
    return gram
