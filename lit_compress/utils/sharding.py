"""Functions that treat sharded tensors (DTensors of FSDP2) and ordinary ones alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, distributed, nn

from lit_compress.utils.errors import UserError

T = TypeVar("T")


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` on this rank, sharing its storage; itself if it is not a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded ``tensor`` on every rank (all ranks must call); itself if it is not a DTensor."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


def own_rows(values: Tensor, place: tuple[int, int]) -> Tensor:
    """Return the part of ``values`` [rows] for this rank's rows of a sharded tensor: FSDP2 splits as torch.chunk does.

    ``place`` is that of :class:`Shards`.
    """
    rank, ranks = place
    size = -(-len(values) // ranks)
    return values[rank * size : (rank + 1) * size]


class Shards:
    """The ranks over which a tensor is sharded, by FSDP2's mesh.

    Attributes:
        group: of these ranks; None if the tensor is not sharded.
        place: (number of this rank's shard, number of shards).
        reduce: sums a tensor over these ranks, in place; None if the tensor is not sharded.
    """

    def __init__(self, tensor: Tensor) -> None:
        mesh = getattr(tensor, "device_mesh", None)
        self.group: Any = None if mesh is None else mesh.get_group()
        self.place: tuple[int, int] = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self.reduce = None if mesh is None else partial(distributed.all_reduce, group=self.group)


def several() -> bool:
    """Return whether this process works together with others."""
    return distributed.is_available() and distributed.is_initialized()


def sum_over_ranks(values: Tensor) -> None:
    """Sum ``values`` over all processes of the run, in place; with one process do nothing."""
    if several():
        distributed.all_reduce(values)


def is_first() -> bool:
    """Return whether this is the first process of the run, also before the processes have a group."""
    return (distributed.get_rank() if several() else getattr(rank_zero_only, "rank", 0)) == 0


def from_first(make: Callable[[], T]) -> T:
    """Return on every rank the result of ``make``, which rank 0 alone calls; all raise its UserError."""
    if not several():
        return make()
    sent: list[Any] = [None, None]
    if is_first():
        try:
            sent[0] = make()
        except UserError as error:
            sent[1] = str(error)
    distributed.broadcast_object_list(sent, 0)
    if sent[1] is not None:
        raise UserError(sent[1])
    return sent[0]


@torch.no_grad()
def send_from_first(net: nn.Module, device: torch.device) -> None:
    """Copy the model of rank 0, on the CPU and not wrapped, to all ranks; the process group sends from ``device``."""
    for tensor in (*net.parameters(), *net.buffers()):
        sent = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        distributed.broadcast(sent, 0)
        tensor.copy_(sent)
