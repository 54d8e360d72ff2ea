"""Facts of the data: rows, classes, lengths, cut, empty and repeated texts; how often each token occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_compress.data.batching import VALIDATION_SEED, drawn_order, row_lengths
from lit_compress.data.readers import CHUNK
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Task
from lit_compress.utils.types import Dataset


def data_facts(task: Task, splits: Mapping[str, tuple[Dataset, Dataset, int]], max_length: int) -> dict[str, Any]:
    """Return the facts of data that is read and tokenised already, as plain values.

    Args:
        task: names the columns.
        splits: by name, the training split first: checked rows, the same as token ids, how many rows there are in all.
        max_length: tokens of the longest input.

    Returns:
        ``max_length`` and a list ``splits``: name ``split``; ``rows``, how many are used of those ``available``;
        ``inputs`` of the model, more than rows if one is read in parts; tokens of the ``longest`` input, and how many
        were ``cut``; rows with an ``empty`` text, ``repeated`` rows and rows that are also ``in_train``, unless rows
        are one text; ``name`` and ``count`` of all ``classes``, of rows or of words.
    """
    trained: set[int] = set()
    found = []
    for name, (rows, encoded, available) in splits.items():
        empty, keys, columns = 0, list[int](), encoded.with_format("numpy")
        counts, classes = Counter[int](), list[dict[str, Any]]()
        if task.labels and task.label in rows.column_names:
            for (label,) in _values(rows, [task.label]):
                counts.update(label if isinstance(label, list) else [label])
            classes = [{"name": name, "count": counts[number]} for number, name in enumerate(task.labels)]
        for row in () if task_type(task).one_text else _values(rows, task.text):
            row = tuple(map(str, row))  # of words
            empty += not all(map(str.strip, row))
            keys.append(hash(row))
        found.append({
            "split": name, "rows": len(rows), "available": available, "inputs": len(encoded),
            "longest": max(row_lengths(encoded)), "cut": int(columns["truncated"][:].sum()), "empty": empty,
            "repeated": len(keys) - len(set(keys)), "in_train": sum(key in trained for key in keys),
            "classes": classes,
        })  # fmt: skip
        trained = trained or set(keys)
    return {"max_length": max_length, "splits": found}


def token_counts(encoded: Dataset, size: int, written: bool = False) -> Tensor:
    """Return how often each of ``size`` tokens occurs in encoded examples as the model reads them, int64 [size].

    If the model writes text, ``written``, the labels are also tokens and are counted.
    """
    counts = np.zeros(size, dtype=np.int64)
    for part in encoded.select_columns(_columns(encoded, written)).iter(CHUNK):
        for rows in part.values():
            ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
            counts += np.bincount(ids[ids >= 0], minlength=size)  # IGNORED is negative
    return torch.from_numpy(counts)


def pieces_missed(encoded: Dataset, size: int, written: bool = False) -> Tensor:
    """Return for drawn training examples the largest token that no other training example has, -1 for none, int64.

    A tenth of them is drawn, the same for every seed; the arguments are as in :func:`token_counts`.
    """
    order = drawn_order(len(encoded), VALIDATION_SEED)
    number = len(order) // 10
    others = token_counts(encoded.select(sorted(order[number:])), size, written).numpy()
    missed = np.full(number, -1)
    for row, example in enumerate(encoded.select(sorted(order[:number])).select_columns(_columns(encoded, written))):
        ids = np.concatenate([np.asarray(some, dtype=np.int64) for some in example.values()])
        ids = ids[ids >= 0]
        missed[row] = max(ids[others[ids] == 0], default=-1)
    return torch.from_numpy(missed)


def changed_inputs(before: Dataset, after: Dataset, old: Sequence[int]) -> int:
    """Return how many encoded examples are other pieces in ``after``, whose id ``i`` is ``old[i]`` in ``before``."""
    names, columns = np.asarray(old), _columns(before)
    pairs = zip(_values(before, columns), _values(after, columns), strict=False)
    changed = sum(list(ids) != [names[text].tolist() for text in texts] for ids, texts in pairs)
    return changed + abs(len(before) - len(after))


def _values(rows: Dataset, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of columns row by row; some rows are in memory at a time."""
    for part in rows.select_columns(list(names)).iter(CHUNK):
        yield from zip(*(part[name] for name in names), strict=True)


def _columns(encoded: Dataset, written: bool = False) -> list[str]:
    """Return the columns of token ids; a row with several texts has several."""
    return [name for name in encoded.column_names if name.startswith(("input_ids", "labels")[: 1 + written])]
