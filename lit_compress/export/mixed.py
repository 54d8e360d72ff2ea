"""Batches of texts of mixed lengths: padded in any order, padded when sorted by length, and packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from lit_compress.export.packed import packed
from lit_compress.export.runtimes import Inputs, Runner, placed

BATCH, PACKED = 32, 128  # texts of a padded batch, and of a packed row
STEP, PACKED_STEP = 64, 512  # tokens are a multiple of it where a shape is compiled or captured
_FIXED = ("graphs", "compiled")
Runs = dict[str, tuple[Runner, str]]  # by runtime, with the device of the inputs


def mixed_calls(
    lengths: Any, inputs: Callable[[int, int], Inputs], runs: Runs, ends: Runs, limit: int, vocabulary: int
) -> dict[str, Callable[[], object]]:
    """Return functions by name; each runs all texts.

    Args:
        lengths: tokens of every text, in any order; a multiple of :data:`BATCH`.
        inputs: returns a padded batch of a number of texts and of tokens.
        runs: runners of padded batches.
        ends: runners of :class:`~lit_compress.export.packed.Packed`.
        limit: tokens of the longest text that the model reads.
        vocabulary: its number of different tokens.
    """
    made = dict[str, Callable[[], object]]()
    for order, some in (("any order", lengths), ("by length", np.sort(lengths))):
        for way, (run, device) in runs.items():
            step = STEP if way in _FIXED else 1
            batches = [placed(_padded(part, inputs, step, limit), device) for part in _parts(some, BATCH)]
            made[f"{order}, {way}"] = partial(_run_all, run, batches)
    for way, (run, device) in ends.items():
        step = min(PACKED_STEP, limit) if way in _FIXED else 1
        rows = [packed(part, step, vocabulary) for part in _parts(lengths, PACKED)]
        tensors = [{name: torch.as_tensor(value, device=device) for name, value in row.items()} for row in rows]
        made[f"packed, {way}"] = partial(_run_all, run, tensors)
    return made


def _run_all(run: Runner, batches: list[Inputs]) -> None:
    for batch in batches:
        run(batch)


def _parts(lengths: Any, count: int) -> Iterator[Any]:
    return (lengths[begin : begin + count] for begin in range(0, len(lengths), count))


def _padded(lengths: Any, inputs: Callable[[int, int], Inputs], step: int, limit: int) -> Inputs:
    """Return a batch that is as long as its longest text, or the next multiple of ``step``."""
    longest = min(-(-int(lengths.max()) // step) * step, limit)
    given, mask = inputs(len(lengths), longest), np.arange(longest) < lengths[:, None]
    return {**given, "attention_mask": torch.as_tensor(mask.astype(np.int64))}
