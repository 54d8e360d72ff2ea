"""Attention masks that transformers makes without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def padding_known(padded: bool | None) -> Iterator[None]:
    """Tell transformers inside the context whether the batch has padding.

    By itself it reads the mask in every forward, for which the host waits: attention over a batch without padding
    needs no mask. The host knows it before the batch is copied to the device.

    Args:
        padded: whether some mask of the batch has a 0; None: not known, transformers looks.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as makers
    from transformers.masking_utils import sdpa_mask

    def make(*args: Any, **settings: Any) -> Tensor | None:
        if not padded:
            settings["attention_mask"] = None
        elif settings.get("attention_mask") is not None:
            settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*args, **settings)

    if padded is not None:
        makers["sdpa"] = make
    try:
        yield
    finally:
        if padded is not None:
            del makers["sdpa"]
