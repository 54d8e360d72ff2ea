"""Nets without values, for what only needs names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_values() -> Iterator[None]:
    """Build nets whose weights have shapes but neither values nor memory.

    Their random initialization is left out: on the device ``meta`` it has no effect, but takes most of the time.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        yield
