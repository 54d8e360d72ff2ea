"""The numbers of units that all layers of a model keep alike: as many heads in each, as many neurons in each.

Every group of layers (attentions, feed-forward networks) has one number. Which numbers a group may have, and each one's
cost and saving, are given; of all combinations that save enough, the one of the least cost is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from lit_compress.numerics.structures import RemovalPath


def uniform_options(losses: Sequence[Tensor], savings: Sequence[Tensor], saving: float) -> list[int] | None:
    """Return an option for every group, so that together they save ``saving`` at the least loss; None if none do.

    Args:
        losses: per group float64 [options], each one's addition to the loss.
        savings: per group float64 [options], each one's saving.
        saving: to reach in all.
    """
    widest = max(range(len(losses)), key=lambda group: len(losses[group]))
    others = [group for group in range(len(losses)) if group != widest]
    grid = torch.tensor(list(product(*(range(len(losses[group])) for group in others))), dtype=torch.int64)
    lost, saved = torch.zeros(2, len(grid), dtype=torch.float64)
    for i, group in enumerate(others):
        lost, saved = lost + losses[group][grid[:, i]], saved + savings[group][grid[:, i]]
    order = savings[widest].argsort(stable=True)
    rising, values = savings[widest][order], losses[widest][order]
    best, places = values.flip(0).cummin(0)  # of all options that save as much or more
    best, places = best.flip(0), len(order) - 1 - places.flip(0)
    first = torch.searchsorted(rising, saving - saved - 1e-9 * max(1.0, abs(saving)))
    there = first < len(order)
    if not there.any():
        return None
    first = first.clamp_max(len(order) - 1)
    row = int(torch.where(there, lost + best[first], torch.inf).argmin())
    chosen = dict(zip(others, grid[row].tolist(), strict=True)) | {widest: int(order[places[first[row]]])}
    return [chosen[group] for group in range(len(losses))]


def loss_of_removal(path: RemovalPath, removed: Tensor) -> Tensor:
    """Return the addition to (M) of removing the first so many groups of ``path``, float64; inside a step by its share.

    Args:
        path: of one matrix.
        removed: numbers of groups, int [options].
    """
    ends = torch.cat([torch.zeros(1, dtype=torch.float64), path.sizes().cumsum(0)])
    costs = torch.cat([torch.zeros(1, dtype=torch.float64), path.costs.double().cumsum(0)])
    step = torch.searchsorted(ends, removed.double(), right=True).clamp(1, len(ends) - 1)
    share = (removed - ends[step - 1]) / (ends[step] - ends[step - 1])
    return costs[step - 1] + share * (costs[step] - costs[step - 1])


def first_removed(path: RemovalPath, count: int) -> Tensor:
    """Return the first ``count`` groups that ``path`` removes, rising, int64; in a step the cheapest alone go first."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *path.steps])[:count].sort().values
