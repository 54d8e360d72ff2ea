"""Sharded or not: one word for both."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` on this rank, sharing its storage; itself if it is not a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def whole(tensor: Tensor) -> Tensor:
    """Return all of ``tensor`` on every rank (every rank must call); itself if it is not a DTensor."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
