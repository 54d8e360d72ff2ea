"""Hidden states and their gradients on disk, between the blocks of a model that goes block by block.

A file holds one tensor for every part of the examples, one after the other. It is written and read with ordinary calls,
in order, and not mapped: mapped and written pages count as the process's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lit_compress.utils.files import atomic_file

StateShape = tuple[int, ...]


@contextmanager
def written(path: Path, dtype: torch.dtype) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that adds a tensor to the file ``path``, which is there when the context ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, temporary.open("wb") as file:

        def add(tensor: Tensor) -> None:
            file.write(tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)

        yield add


def stored(
    path: Path, dtype: torch.dtype, shapes: Sequence[StateShape], order: Iterable[int] | None = None
) -> Iterator[Tensor]:
    """Yield the tensors [copies, *shape] of the file ``path``, one after the other; all have as many copies.

    Args:
        path: of the file.
        dtype: of its numbers.
        shapes: of all tensors in it.
        order: numbers of the tensors that are read; None: all, from the first.
    """
    each = torch.empty(0, dtype=dtype).element_size()
    copies = os.path.getsize(path) // (each * sum(map(prod, shapes)))
    starts = list(accumulate(map(prod, shapes), initial=0))
    with path.open("rb") as file:
        for i in range(len(shapes)) if order is None else order:
            file.seek(copies * starts[i] * each)
            data = bytearray(file.read(copies * prod(shapes[i]) * each))
            yield torch.frombuffer(data, dtype=dtype).view(copies, *shapes[i])
