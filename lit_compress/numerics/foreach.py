"""Element-wise work on many tensors in few operator calls: an accelerator often waits for the next call of the host.

``torch._foreach_*`` takes a list of tensors in one call. On a CPU a call costs little and cache counts for more, so
there every tensor is a list of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Reduce = Callable[[Tensor], object]  # in-place all-reduce (SUM) over ranks
ELEMENTS = 1 << 26  # most elements of a list on an accelerator, to bound temporary memory


def together(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the parts of ``tensors`` that are worked on together, in order."""
    most = 0 if tensors and tensors[0].device.type == "cpu" else ELEMENTS
    start = number = 0
    for i, tensor in enumerate(tensors):
        if i > start and number + tensor.numel() > most:
            yield slice(start, i)
            start, number = i, 0
        number += tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one axis; a single tensor is not copied if it is contiguous."""
    flat = [tensor.flatten() for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype on the CPU, for which the host waits once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    parts = joined(tensors).cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@lru_cache(maxsize=32)
def constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``numbers`` as an int64 tensor on ``device``, which is copied there once; not to be changed."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of all elements, 0-dim; inf or NaN if an element is. None may be empty."""
    if tensors[0].device.type == "cpu":  # 20 times faster there than the norm
        ends = [end.float() for tensor in tensors for end in torch.aminmax(tensor)]
        return torch.stack(ends).abs().amax()
    return torch.stack(list(torch._foreach_norm(list(tensors), torch.inf))).float().amax()
