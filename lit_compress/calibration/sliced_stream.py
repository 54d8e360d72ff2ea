"""Principal axes of the residual stream, site by site, each behind the slices of all sites before it (SliceGPT).

With U the axes of a site, and its first k kept, Q = U[:, :k], every reader of the site gets Q Q^T x in place of x. In
these coordinates, the dense model's, a slice is a hook, and nothing is turned before all axes are known.

Norms after the residual sum: every site has forwards of its own, from the first block up to it (this file). Norms
before the sub-layers: the states before a block are kept, and forwards are of one block (sliced_by_block.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.calibration.grams import Gram
from lit_compress.calibration.uses import Batch, Stop, frozen, real_rows, token_places, tokens_at
from lit_compress.models.residual_stream import ResidualStream
from lit_compress.numerics.pca import centred_axes, principal_axes
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.devices import double, place_of_sums
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note, track

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sliced_axes(
    net: PreTrainedModel,
    stream: ResidualStream,
    widths: Sequence[int],
    batches: Callable[[], Iterable[Batch]],
    kind: TaskType | str,
    *,
    centred: bool,
    reduce: Callable[[Tensor], object] | None = None,
    agree: Callable[[Callable[[], Tensor]], Tensor] = lambda make: make(),
) -> list[Tensor]:
    """Return the axes U [d, d] of every site, by falling energy behind the slices before; float64, on the CPU.

    The model runs where it is, in evaluation mode; afterwards it is as it was.

    Args:
        net: dense; its norms are after the residual sum.
        stream: of ``net``, whose sub-layers have a basis each.
        widths: k of every site.
        batches: function that returns the calibration batches again; called once per site.
        kind: of the task; or its name, for the usual one.
        centred: whether the norms subtract a mean: then the axes are computed without it.
        reduce: in-place all-reduce (SUM) over ranks with other examples.
        agree: function that returns on every rank its argument's result on the first.

    Raises:
        UserError: there are no examples, or a hidden state is inf or NaN.
    """
    axes: list[Tensor] = []
    handles: list[Any] = []
    stacks = list(dict.fromkeys(place.stack for place in stream.sites))
    find = centred_axes if centred else principal_axes
    try:
        with frozen(net), torch.no_grad(), torch.autocast(net.device.type, enabled=False):
            for i, place in track(list(enumerate(stream.sites)), "principal axes", len(stream.sites)):
                norms = [net.get_submodule(name) for name in place.norms]
                passes = _passes(net, batches(), task_type(kind), stacks.index(place.stack))
                gram = stream_gram(norms, net.config.hidden_size, net.device, passes, reduce=reduce)
                axes.append(agree(lambda gram=gram: find(gram.whole())[0]))  # type: ignore[misc]
                handles += _slice(net, stream, i, axes[i][:, : widths[i]])
    finally:
        for handle in handles:
            handle.remove()
    return axes


def stream_gram(
    norms: Sequence[nn.Module],
    size: int,
    device: torch.device,
    passes: Iterable[tuple[Tensor, Callable[[], Any]]],
    stop: bool = True,
    reduce: Callable[[Tensor], object] | None = None,
) -> Gram:
    """Return the sum of x x^T over the tokens that reach some norms; a note says if they are fewer than dimensions.

    Args:
        norms: in the order of a forward.
        size: of a hidden state.
        device: of the forwards.
        passes: places of the tokens that count, int64, and a function that does a forward.
        stop: whether a forward stops at the last norm; else its output is also read.
        reduce: in-place all-reduce (SUM) over ranks with other examples.

    Raises:
        UserError: there are no examples.
    """
    gram, count = Gram(size, torch.float64, place_of_sums(device)), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.zeros(0)

    def read(x: Tensor, last: bool = False) -> None:
        taken = double(tokens_at(x, places))
        gram.add(taken)
        count.add_(len(taken))
        if last and stop:
            raise Stop

    def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        read(args[0], norm is norms[-1])

    handles = [norm.register_forward_pre_hook(hook) for norm in norms]
    try:
        for where, forward in passes:
            places = where
            with suppress(Stop):
                read(forward())
    finally:
        for handle in handles:
            handle.remove()
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


def _passes(
    net: PreTrainedModel, batches: Iterable[Batch], task: TaskType, stack: int
) -> Iterator[tuple[Tensor, Callable[[], Any]]]:
    for batch in batches:
        rows = real_rows(task, batch, net.device, None)
        if len(rows["index"]):
            yield token_places(task.masks(rows)[stack]), partial(task.run, net, rows)


def _slice(net: PreTrainedModel, stream: ResidualStream, site: int, kept: Tensor) -> list[Any]:
    """Let the norms of a site have only its directions ``kept`` [d, k]."""
    if kept.shape[0] == kept.shape[1]:
        return []
    projector = (kept @ kept.mT).to(net.device, net.dtype)
    readers = [net.get_submodule(name) for name in stream.sites[site].norms]
    return [module.register_forward_pre_hook(lambda _, args: (args[0] @ projector,)) for module in readers]
