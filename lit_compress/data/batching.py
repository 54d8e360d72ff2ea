"""The order of batches, a pure function of seed and epoch, and a loader that resumes at a position of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

# Rows are shuffled, then sorted by length within groups of this many batches: little padding, still random.
# A small epoch has at least this number of groups, or its batches would have the same rows in every epoch.
GROUP_BATCHES = 50
SMALLEST_NUMBER_OF_GROUPS = 4


def batch_order(
    lengths: Sequence[int],
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
) -> list[list[int]]:
    """Return the batches of one rank as lists of row numbers; rows of similar length are together.

    All ranks get the same number of batches, and their k-th batches have the same size and similar lengths.
    A number of rows that is not a multiple of ``world_size`` is filled up: for training (``shuffle``) with
    rows from the start of the epoch's order; for evaluation with copies of the last row, written as
    ``~row`` (negative), so that metrics can leave them out. With one rank every row comes exactly once.

    Args:
        lengths: number of tokens of every row.
        batch_size: rows per rank and batch; only the last batch (before shuffling) is smaller.
        seed: decides the order, together with ``epoch``, if ``shuffle``.
        epoch: counted from 0.
        rank: 0 <= rank < world_size.
        world_size: number of processes that share an epoch.
        shuffle: a new order every epoch (training); else by falling length, so that running out of
            memory shows in the first batch.
    """
    rows = list(range(len(lengths)))
    missing = -len(rows) % world_size
    chunk = batch_size * world_size
    if not shuffle:
        rows.sort(key=lambda row: -lengths[row])
        rows += [~row for row in rows[-1:]] * missing
        return [rows[start : start + chunk][rank::world_size] for start in range(0, len(rows), chunk)]
    # the multiplier keeps (seed, epoch) and (seed + 1, epoch - 1) apart
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    rows = torch.randperm(len(rows), generator=generator).tolist()
    rows = (rows * (1 + world_size))[: len(rows) + missing]
    group_rows = chunk * max(1, min(GROUP_BATCHES, len(rows) // (chunk * SMALLEST_NUMBER_OF_GROUPS)))
    for start in range(0, len(rows), group_rows):
        group = slice(start, start + group_rows)
        rows[group] = sorted(rows[group], key=lambda row: lengths[row])
    chunks = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
    return [chunks[k][rank::world_size] for k in torch.randperm(len(chunks), generator=generator).tolist()]


class BatchOrder(Sampler[list[int]]):
    """A sampler of the batches of :func:`batch_order` from a position on, for ``DataLoader(batch_size=None)``.

    Attributes:
        epoch: the epoch of the next iteration.
        skip: number of its batches that the next iteration leaves out, because they were delivered before.
        delivered: number of batches of the epoch delivered so far, without those that workers read ahead.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        self.lengths = lengths
        self.settings: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "rank": rank,
            "world_size": world_size,
            "shuffle": shuffle,
        }
        self.epoch = 0
        self.skip = 0
        self.delivered = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; in the current epoch keep the position.

        Lightning calls this before every epoch, after it has restored the position and after it has asked
        for an iterator.
        """
        if epoch != self.epoch:
            self.epoch, self.skip, self.delivered = epoch, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter(batch_order(self.lengths, epoch=self.epoch, **self.settings)[self.skip :])

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, at any position."""
        chunk = self.settings["batch_size"] * self.settings["world_size"]
        return -(-len(self.lengths) // chunk)


class ResumableLoader(DataLoader):
    """A loader over a :class:`BatchOrder` whose position is saved in Lightning's checkpoints.

    It has no ``__init__`` of its own, because Lightning makes loaders again from the arguments of
    ``DataLoader``. Give ``sampler=BatchOrder(...)`` and ``batch_size=None``.
    """

    @property
    def order(self) -> BatchOrder:
        """The sampler."""
        assert isinstance(self.sampler, BatchOrder)
        return self.sampler

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, and the number of its batches that were delivered."""
        return {"epoch": self.order.epoch, "batch": self.order.delivered}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next iteration continue at the position in ``state_dict``."""
        self.order.epoch = state_dict["epoch"]
        self.order.skip = self.order.delivered = state_dict["batch"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the rest of the current epoch after a restore, else all of it.

        A generator, so the position is read at the first batch: Lightning asks for the iterator before it
        says which epoch it is.
        """
        order = self.order
        epoch = order.epoch
        batches = super().__iter__()  # reads the position
        order.delivered, order.skip = order.skip, 0
        for batch in batches:
            order.delivered += 1
            yield batch
        order.set_epoch(epoch + 1)
