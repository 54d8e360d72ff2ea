"""How many threads a run works with: as many as its model gains from, and the same number when it is continued."""

from __future__ import annotations

import os

import torch

SMALL = 3_000_000  # weights in the blocks' matrices; below, a run has one thread
_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_threads(weights: int, cores: int, recorded: int | None = None) -> int:
    """Return the number of threads: the checkpoint's, else one for a small model, else all cores.

    Args:
        weights: of the matrices of the transformer blocks.
        cores: of the machine, as PyTorch sees them.
        recorded: what the run worked with so far; None if it begins.

    >>> choose_threads(800_000, 8), choose_threads(10_000_000, 8), choose_threads(10_000_000, 8, recorded=2)
    (1, 8, 2)
    """
    return recorded or (1 if weights < SMALL else cores)


def use_threads(weights: int, recorded: int | None = None) -> int:
    """Set the threads of this process and return their number; a number set in the environment is kept.

    Sums are rounded in another order with another number of threads, so a continued run keeps its own.

    Args:
        weights: of the matrices of the transformer blocks.
        recorded: what the run worked with so far; None if it begins.
    """
    if not any(name in os.environ for name in _GIVEN):
        torch.set_num_threads(choose_threads(weights, torch.get_num_threads(), recorded))
    return torch.get_num_threads()
