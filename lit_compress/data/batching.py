"""Which rows a batch has, a pure function of seed and epoch; batches as tensors; a loader that resumes anywhere.

The order of a training is made for optimizer steps, whose rows are then dealt out to devices and micro-batches. So any
split of the same global batch takes the same steps, and a position counts steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from lit_compress.data.readers import CHUNK
from lit_compress.tasks.base import IGNORED, KIND
from lit_compress.utils.errors import UserError
from lit_compress.utils.types import Dataset

# Rows are shuffled, then sorted by length within groups of this many batches: little padding, still random.
# A small epoch has at least this number of groups, or its batches would have the same rows in every epoch.
GROUP_BATCHES = 50
SMALLEST_NUMBER_OF_GROUPS = 4
VALIDATION_SEED = 0  # of drawn validation examples: runs with different seeds are compared on the same ones


@dataclass(frozen=True)
class Share:
    """The part of an optimizer step's rows that one rank reads."""

    rows: list[int]  # numbers of all rows of the step, on all ranks
    own: list[int]  # numbers of the rank's rows; ``~row`` (negative) for a copy of a row that only fills up
    parts: int  # micro-batches of ``own``, of nearly the same size; the same number on every rank


def step_order(lengths: Sequence[int], size: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """Return the row numbers of every optimizer step of an epoch; rows of similar length are together.

    Every row comes exactly once. Devices and micro-batches have no influence, see :func:`dealt`.

    Args:
        lengths: number of tokens of every row.
        size: rows of a step (the global batch); only the last one, before steps are shuffled, is smaller.
        seed, epoch: decide the order together; epochs count from 0.
    """
    # the multiplier keeps (seed, epoch) and (seed + 1, epoch - 1) apart
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    rows = torch.randperm(len(lengths), generator=generator).tolist()
    group_rows = size * max(1, min(GROUP_BATCHES, len(rows) // (size * SMALLEST_NUMBER_OF_GROUPS)))
    for start in range(0, len(rows), group_rows):
        group = slice(start, start + group_rows)
        rows[group] = sorted(rows[group], key=lambda row: lengths[row])
    steps = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [steps[k] for k in torch.randperm(len(steps), generator=generator).tolist()]


def dealt(rows: list[int], batch_size: int, rank: int, world_size: int) -> Share:
    """Return the share of one of ``world_size`` ranks in the ``rows`` of a step, which are sorted by length.

    The shares of all ranks have similar lengths, and sizes that differ by at most one row. A rank that has fewer rows
    than micro-batches, of at most ``batch_size`` rows, gets copies of a row, each the only row of its micro-batch.
    """
    own = rows[rank::world_size]
    parts = ceil(ceil(len(rows) / world_size) / batch_size)
    return Share(rows, own + [~rows[-1]] * (parts - len(own)), parts)


def batch_order(lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Return the batches of one rank for evaluation as lists of row numbers, by falling length.

    So running out of memory shows in the first batch. All ranks get the same number of batches of the same sizes, of
    ``batch_size`` rows except the last: a number of rows that is not a multiple of ``world_size`` is filled up with
    copies of the last row, written as ``~row`` (negative), so that metrics can leave them out. ``lengths`` are the
    numbers of tokens of all rows.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rows += [~row for row in rows[-1:]] * (-len(rows) % world_size)
    chunk = batch_size * world_size
    return [rows[start : start + chunk][rank::world_size] for start in range(0, len(rows), chunk)]


@dataclass(eq=False)
class BatchOrder(Sampler[list[int] | Share]):
    """A sampler of one rank's batches from a position on, for ``DataLoader(batch_size=None)``.

    For evaluation these are the batches of :func:`batch_order`; for training the rank's shares of the steps of
    :func:`step_order`, as plain lists of rows if a step is not divided.
    """

    lengths: Sequence[int]  # number of tokens of every row
    batch_size: int  # most rows per rank and micro-batch
    seed: int = 0  # decides the order of a training
    rank: int = 0  # of this process
    world_size: int = 1  # processes that share an epoch
    shuffle: bool = True  # a new order every epoch, for training
    size: int = 0  # rows of a step on all ranks; 0 for one micro-batch of each
    epoch: int = 0  # of the next iteration
    skip: int = 0  # batches of it that the next iteration leaves out, because they were delivered before
    delivered: int = 0  # batches of the epoch delivered so far, without those that workers read ahead

    def __post_init__(self) -> None:
        self.size = self.size or self.batch_size * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, before which Lightning calls this; in the current epoch keep the position."""
        if epoch != self.epoch:
            self.epoch, self.skip, self.delivered = epoch, 0, 0

    def __iter__(self) -> Iterator[list[int] | Share]:
        if not self.shuffle:
            return iter(batch_order(self.lengths, self.batch_size, self.rank, self.world_size)[self.skip :])
        steps = step_order(self.lengths, self.size, self.seed, self.epoch)[self.skip :]
        if self.size == self.batch_size:
            return iter(steps)
        return (dealt(rows, self.batch_size, self.rank, self.world_size) for rows in steps)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, at any position."""
        return ceil(len(self.lengths) / self.size)


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
        """The number of texts that the model reads at once, and the tokens of the longest text."""
        texts = len(further_texts(self.dataset.encoded)) if self.order.shuffle else 0  # alone in an evaluation
        return (1 + texts) * min(self.order.batch_size, len(self.order.lengths)), max(self.order.lengths, default=1)

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


def further_texts(encoded: Dataset) -> list[str]:
    """Return the columns of token ids of all texts of a row but the first."""
    return [name for name in encoded.column_names if name.startswith("input_ids_")]


def row_lengths(encoded: Dataset) -> list[int]:
    """Return the number of tokens of every row, the longest text's if it has several."""
    lengths: list[int] = encoded.with_format("numpy")["length"][:].tolist()
    if not (others := further_texts(encoded)):
        return lengths
    rows = chain.from_iterable(
        zip(*(part[name] for name in others), strict=True) for part in encoded.select_columns(others).iter(CHUNK)
    )
    return [max(length, *map(len, row)) for length, row in zip(lengths, rows, strict=True)]


def drawn_order(
    rows: int, seed: int, lists: Sequence[str] | None = None, kinds: Sequence[int] | None = None
) -> list[int]:
    """Return the numbers below ``rows`` in the order in which rows are drawn.

    ``lists`` says for every row which list it belongs to; a list is drawn as a whole, with its first row. ``kinds``
    says which kind of text a row is of; the kinds take turns until one has no more.
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    if kinds is not None:
        turns = {kind: count() for kind in kinds}
        turn = {row: next(turns[kinds[row]]) for row in order}
        order.sort(key=turn.__getitem__)
    if lists is None:
        return order
    drawn: dict[str, list[int]] = {}
    for row in order:
        drawn.setdefault(lists[row], []).append(row)
    return [row for together in drawn.values() for row in together]


def held_out(
    rows: int, number: int, seed: int, one_text: bool = False, lists: Sequence[str] | None = None,
    kinds: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Return the numbers of the rows to train on and of the ``number`` that are held out, in the order of the rows.

    With the same seed a smaller draw is part of a larger one. The last of the ``lists``, see :func:`drawn_order`, may
    be held out in part. Of ``one_text`` neighbours are held out, as many of each of its ``kinds``.

    Raises:
        UserError: none would be left to train on.
    """
    if number >= rows:
        raise UserError(f"data.hold_out: {number} of {rows} training rows leaves none; the largest is {rows - 1}")
    if one_text:
        held, generator, places = list[int](), torch.Generator().manual_seed(seed), dict[int, list[int]]()
        for row, kind in enumerate(kinds or [0] * rows):
            places.setdefault(kind, []).append(row)
        for turn, own in enumerate(places.values()):
            if (share := (number + turn) // len(places)) >= len(own):
                most = len(places) * (len(own) - 1)
                raise UserError(f"data.hold_out: {number} leaves none of a kind of {len(own)} rows; nearest: {most}")
            start = int(torch.randint(len(own) - share + 1, (), generator=generator))
            held += own[start : start + share]
    else:
        held = sorted(drawn_order(rows, seed, lists)[:number])
    without = set(held)
    return [row for row in range(rows) if row not in without], held


@dataclass(eq=False)
class PaddedBatches(TorchDataset[dict[str, Any]]):
    """Encoded rows, indexed by the row numbers of a whole batch.

    A batch has ``input_ids``, ``attention_mask`` and, if the tokenizer makes them, ``token_type_ids``
    [batch, tokens]; ``labels``, if there are any: [batch] (int64, or float32 for regression), or [batch, ...];
    ``index`` [batch], the row numbers; and further columns of the type of task. A negative number ``~row`` is a copy of
    that row that only fills up a batch: its index is -1.

    The batch of a :class:`Share` has the rank's rows, padded as the whole step's are. It also has ``parts``, the number
    of its micro-batches, and ``total``, the counts of the whole step.
    """

    encoded: Dataset  # the rows as token ids
    pad_token: int  # with which texts are filled up
    counts: Callable[[dict[str, Tensor]], Tensor] | None = None  # of a batch, the ``total`` of its rows; for shares
    rows: Any = None  # as they were read
    available: int | None = None  # rows before some were drawn; None if they are one text

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, numbers: list[int] | Share) -> dict[str, Any]:
        if isinstance(numbers, Share):
            return self._share(numbers)
        columns = self.encoded[[~number if number < 0 else number for number in numbers]]
        lengths = torch.tensor(columns["length"]).clamp_min(1)  # of a text without tokens, the padding is read
        longest = int(lengths.max())
        batch = {
            "input_ids": _padded(columns["input_ids"], self.pad_token),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
            "index": torch.tensor([max(number, -1) for number in numbers]),
        }
        for name in columns.keys() - {"input_ids", "length", "truncated", KIND}:
            ids = name.startswith("input_ids")  # of further texts
            batch[name] = _padded(columns[name], self.pad_token if ids else IGNORED if name == "labels" else 0)
        return batch

    def _share(self, share: Share) -> dict[str, Any]:
        assert self.counts is not None
        batch, place = self[share.rows], {row: i for i, row in enumerate(share.rows)}
        chosen = torch.tensor([place[~number if number < 0 else number] for number in share.own])
        own = {name: column[chosen] for name, column in batch.items()}
        own["index"] = own["index"].where(torch.tensor(share.own) >= 0, -1)
        return {**own, "parts": share.parts, "total": self.counts(batch)}


def _padded(rows: list[Any], value: int) -> Tensor:
    """Return the rows as a tensor; lists are filled up with ``value`` at the right."""
    if not isinstance(rows[0], list):
        return torch.tensor(rows)
    longest = max(1, *map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])
