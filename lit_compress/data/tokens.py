"""Tokens of the training data: how often each occurs, and the same data read with another tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
    counts = np.zeros(size, dtype=np.int64)
    encoded = data.train_tokens()
    columns = [*_texts(encoded), *(["labels"] if written else [])]
    for ids in _rows(encoded, [name for name in columns if name in encoded.column_names]):
        counts += np.bincount(ids[ids >= 0], minlength=size)  # IGNORED is negative
    return torch.from_numpy(counts)


def changed_inputs(data: DataModule, other: DataModule, old: Sequence[int]) -> int:
    """Return how many training inputs are other pieces for the tokenizer of ``other``; ``old[i]`` is its id ``i``."""
    names, columns = np.asarray(old), _texts(data.train_tokens())
    before, after = (some.train_tokens().select_columns(columns) for some in (data, other))
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
