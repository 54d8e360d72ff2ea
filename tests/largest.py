"""The largest tensor that some code makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.elements, self.dtype = 0, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and self.dtype in (None, value.dtype):
                storage = value.untyped_storage().nbytes() // value.element_size()
                self.elements = max(self.elements, min(value.numel(), storage))  # an expanded one takes no memory
        return output


@contextmanager
def largest_tensor(dtype: torch.dtype | None = None) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many elements the largest tensor has that an operator has returned so far.

    ``dtype``: of the tensors that count; None: all.
    """
    with _Largest(dtype) as mode:
        yield lambda: mode.elements
