"""Tokens of the training data: how often each occurs, and the same data read with another tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lit_compress.data.batching import drawn_order
from lit_compress.data.splits import VALIDATION_SEED

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from lit_compress.data.datamodule import DataModule

CHUNK = 10_000  # rows that are Python objects at one time


def with_tokenizer(data: DataModule, tokenizer: PreTrainedTokenizerBase) -> DataModule:
    """Return ``data`` as ``tokenizer`` reads it; the splits are tokenised again when they are asked for."""
    other = copy.copy(data)
    other.tokenizer, other._splits, other.predicted = tokenizer, {}, ""
    return other


def token_counts(data: DataModule, size: int, written: bool = False) -> Tensor:
    """Return how often each token occurs in the training examples as the model reads them, int64 [size].

    Args:
        data: of the task.
        size: number of tokens.
        written: the labels are also tokens and are counted: the model writes text.
    """
    return torch.from_numpy(_counts(data.train_tokens(), size, written))


def pieces_missed(data: DataModule, size: int, written: bool = False, share: float = 0.1) -> Tensor:
    """Return for drawn training examples the largest token that no other training example has, -1 for none, int64.

    The draw is the same for every seed.

    Args:
        data, size, written: as :func:`token_counts`.
        share: of the training examples that are drawn.
    """
    encoded = data.train_tokens()
    order = drawn_order(len(encoded), VALIDATION_SEED)
    number = int(share * len(order))
    others = _counts(encoded.select(sorted(order[number:])), size, written)
    missed = np.full(number, -1)
    for row, example in enumerate(encoded.select(sorted(order[:number])).select_columns(_columns(encoded, written))):
        ids = np.concatenate([np.asarray(some, dtype=np.int64) for some in example.values()])
        ids = ids[ids >= 0]
        missed[row] = max(ids[others[ids] == 0], default=-1)
    return torch.from_numpy(missed)


def _counts(encoded: Dataset, size: int, written: bool) -> Any:
    counts = np.zeros(size, dtype=np.int64)
    for ids in _rows(encoded, _columns(encoded, written)):
        counts += np.bincount(ids[ids >= 0], minlength=size)  # IGNORED is negative
    return counts


def _columns(encoded: Dataset, written: bool) -> list[str]:
    return [name for name in [*_texts(encoded), *(["labels"] if written else [])] if name in encoded.column_names]


def changed_inputs(before: Dataset, after: Dataset, old: Sequence[int]) -> int:
    """Return how many encoded examples are other pieces in ``after``, whose id ``i`` is ``old[i]`` in ``before``."""
    names, columns = np.asarray(old), _texts(before)
    before, after = (some.select_columns(columns) for some in (before, after))
    changed = abs(len(before) - len(after))
    for first, second in zip(before.iter(CHUNK), after.iter(CHUNK), strict=False):
        pairs = zip(*(zip(*(part[name] for name in columns), strict=True) for part in (first, second)), strict=False)
        changed += sum(list(ids) != [names[text].tolist() for text in texts] for ids, texts in pairs)
    return changed


def _texts(encoded: Dataset) -> list[str]:
    """Return the columns of token ids; a row with several texts has several."""
    return [name for name in encoded.column_names if name.startswith("input_ids")]


def _rows(encoded: Dataset, columns: list[str]) -> Iterator[Any]:
    """Yield the ids of many rows of one column at a time, int64."""
    for part in encoded.select_columns(columns).iter(CHUNK):
        for rows in part.values():
            yield np.fromiter((number for row in rows for number in row), dtype=np.int64)
