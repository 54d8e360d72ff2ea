"""Which rows a batch has, a pure function of seed and epoch; batches as tensors; a loader that resumes anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from lit_compress.tasks.base import IGNORED
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

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

    dataset: PaddedBatches

    @property
    def order(self) -> BatchOrder:
        """The sampler."""
        assert isinstance(self.sampler, BatchOrder)
        return self.sampler

    @property
    def largest(self) -> tuple[int, int]:
        """The number of texts of a batch, and the tokens of the longest text."""
        return min(self.order.settings["batch_size"], len(self.order.lengths)), max(self.order.lengths, default=1)

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


def drawn_order(rows: int, seed: int, lists: Sequence[str] | None = None) -> list[int]:
    """Return the numbers of the rows in the order in which they are drawn.

    Args:
        rows: how many there are.
        seed: of the draw.
        lists: for every row which list it belongs to; a list is drawn as a whole, with its first row.
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    if lists is None:
        return order
    drawn: dict[str, list[int]] = {}
    for row in order:
        drawn.setdefault(lists[row], []).append(row)
    return [row for together in drawn.values() for row in together]


def held_out(
    rows: int, number: int, seed: int, one_text: bool = False, lists: Sequence[str] | None = None
) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows to train on and of those that are held out, both in the order of the rows.

    Args:
        rows: how many there are.
        number: how many are held out; with the same seed a smaller draw is part of a larger one.
        seed: of the draw.
        one_text: the rows are one text, so that neighbours are held out.
        lists: as :func:`drawn_order`; the last one may be held out in part.

    Raises:
        UserError: none would be left to train on.
    """
    if number >= rows:
        raise UserError(f"data.hold_out: {number} of {rows} training rows leaves none; the largest is {rows - 1}")
    if one_text:
        start = int(torch.randint(rows - number + 1, (), generator=torch.Generator().manual_seed(seed)))
        held = list(range(start, start + number))
    else:
        held = sorted(drawn_order(rows, seed, lists)[:number])
    without = set(held)
    return [row for row in range(rows) if row not in without], held


class PaddedBatches(TorchDataset[dict[str, Tensor]]):
    """Encoded rows, indexed by the row numbers of a whole batch.

    A batch has ``input_ids``, ``attention_mask`` and, if the tokenizer makes them, ``token_type_ids``
    [batch, tokens]; ``labels``, if there are any: [batch] (int64, or float32 for regression), or [batch, ...];
    ``index`` [batch], the row numbers; and further columns of the type of task. A negative number ``~row`` is a copy of
    that row that only fills up a batch: its index is -1.
    """

    def __init__(self, encoded: Dataset, pad_token: int) -> None:
        self.encoded = encoded
        self.pad_token = pad_token

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, numbers: list[int]) -> dict[str, Tensor]:
        columns = self.encoded[[~number if number < 0 else number for number in numbers]]
        longest = max(columns["length"])
        lengths = torch.tensor(columns["length"])
        batch = {
            "input_ids": _padded(columns["input_ids"], self.pad_token),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
            "index": torch.tensor([max(number, -1) for number in numbers]),
        }
        for name in columns.keys() - {"input_ids", "length", "truncated"}:
            batch[name] = _padded(columns[name], IGNORED if name == "labels" else 0)
        return batch


def _padded(rows: list[Any], value: int) -> Tensor:
    """Return the rows as a tensor; lists are filled up with ``value`` at the right."""
    if not isinstance(rows[0], list):
        return torch.tensor(rows)
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
