"""Removal of inputs of a matrix (neurons of the second feed-forward matrix, heads of the attention's output).

The rest of W [out, in] is updated so that (M) of ``kronecker.py`` is least. With H the damped second moment of the
inputs (or their covariance) and S the inputs that go (second-order compression, section 5; the update is the optimal
brain surgeon's in blocks, as in ZipLM, Kurtic et al. 2023, arXiv 2302.04089):

    K = ((H^-1)_SS)^-1
    cost    tr(G W_S K W_S^T), the increase of (M) = 2 dL / T, on the scale of kronecker_svd's sigma^2          (C)
    update  W <- W - W_S K (H^-1)_S:                                                                            (U)
            H^-1 <- H^-1 - (H^-1)_:S K (H^-1)_S:, the inverse of H without S

The update does not depend on G, nor on the order in which S was removed. Everything is float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil

import torch
from torch import Tensor

from lit_compress.numerics.kronecker import centred, damped_root
from lit_compress.utils.errors import UserError

_ROWS = 256  # that are moved at a time


@torch.no_grad()
def inverse_moment(inputs: Tensor, name: str = "weight") -> Tensor:
    """Return H^-1 [in, in] of the damped second moment A or C [in, in].

    A float64 moment on the CPU becomes its inverse, which takes no memory of its own. Errors as in
    :func:`~lit_compress.numerics.kronecker.damped_root`.
    """
    factor = damped_root(inputs, name)
    return torch.cholesky_inverse(factor, out=factor).mT  # in place: LAPACK's order


@torch.no_grad()
def removal_costs(weight: Tensor, inverse: Tensor, groups: Tensor) -> Tensor:
    """Return the cost [groups], float64, of removing each alone, after the update of the rest, equation (C).

    Args:
        weight: K^T W [out, in], with the root K of G; float64.
        inverse: H^-1 [in, in], float64.
        groups: int [groups, size], the inputs of every group; a head's inputs, or one neuron.
    """
    if groups.shape[1] == 1:
        single = groups[:, 0]
        return torch.linalg.vector_norm(weight, dim=0)[single].square() / inverse.diagonal()[single]
    blocks = inverse[groups[:, :, None], groups[:, None, :]]
    columns = weight.T[groups]  # [groups, size, out]
    return torch.linalg.solve_triangular(torch.linalg.cholesky(blocks), columns, upper=False).square().sum((1, 2))


@torch.no_grad()
def without_inputs(weight: Tensor, inverse: Tensor, removed: Tensor) -> Tensor:
    """Return W [out, in] after the removal of the inputs ``removed`` [S], equation (U); their columns are zero.

    The bias belongs to it if H, whose inverse [in, in] is given, is a covariance: ``kronecker.change_of_bias``. All is
    float64.
    """
    new = weight.addmm(weight[:, removed], _solved(inverse, removed), alpha=-1)
    new[:, removed] = 0.0
    return new


def _solved(inverse: Tensor, removed: Tensor) -> Tensor:
    """Return K (H^-1)_S: of equation (U)."""
    rows = inverse[removed]
    return torch.cholesky_solve(rows, torch.linalg.cholesky(rows[:, removed]))


@dataclass(frozen=True)
class RemovalPath:
    """The greedy order in which the groups of inputs of one matrix would be removed.

    Attributes:
        steps: the groups that go together at each step, int [n] each.
        costs: float64 [steps], each step's addition to (M).
    """

    steps: tuple[Tensor, ...]
    costs: Tensor

    def sizes(self) -> Tensor:
        """Return how many groups go at each step, float64 [steps]."""
        return torch.tensor([len(step) for step in self.steps], dtype=torch.float64)

    def loss(self, removed: Tensor) -> Tensor:
        """Return the addition to (M) without the first ``removed`` [options] groups; inside a step by its share."""
        ends = torch.cat([torch.zeros(1, dtype=torch.float64), self.sizes().cumsum(0)])
        costs = torch.cat([torch.zeros(1, dtype=torch.float64), self.costs.double().cumsum(0)])
        step = torch.searchsorted(ends, removed.double(), right=True).clamp(1, len(ends) - 1)
        share = (removed - ends[step - 1]) / (ends[step] - ends[step - 1])
        return costs[step - 1] + share * (costs[step] - costs[step - 1])

    def first(self, count: int) -> Tensor:
        """Return the first ``count`` groups that go, rising, int64; in a step the cheapest alone go first."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *self.steps])[:count].sort().values


@torch.no_grad()
def removal_path(
    weight: Tensor,
    inputs: Tensor,
    gradients: Tensor | None,
    groups: Tensor,
    *,
    mean: Tensor | None = None,
    chunk: float = 0.0,
    keep: int = 0,
    multiple: int = 1,
    name: str = "weight",
) -> RemovalPath:
    """Remove groups of inputs one after the other, cheapest first, with new costs after every step.

    The costs do not depend on other matrices, so that the paths of many matrices can be compared afterwards
    (:func:`cheapest_first`) and the chosen ones are then removed at once (:func:`without_inputs`).

    Args:
        weight: W [out, in].
        inputs: A [in, in]. A float64 one on the CPU is overwritten, as are gradients. The work takes no memory but its
            own, eight bytes times the square of the number of inputs.
        gradients: G [out, out]; None for the identity.
        groups: int [groups, size], disjoint.
        mean: m [in], for the covariance instead of A; the bias carries the mean.
        chunk: at each step this share of the groups that are left goes, at least one; 0.04 serves for neurons.
        keep: how many groups stay.
        multiple: a multiple of it is left after every step.

    Raises:
        UserError: a moment is not usable.
    """
    inverse, wide = inverse_moment(centred(inputs, mean), name), weight.detach().to("cpu", torch.float64).T
    if gradients is not None:
        wide = wide @ damped_root(gradients, name, "gradients")
    wide = wide.T.clone(memory_format=torch.contiguous_format)
    del inputs, gradients
    left, places = torch.arange(len(groups)), groups.cpu()
    steps, costs = [], []
    while len(left) > keep:
        alone = removal_costs(wide, inverse, places)
        stay = len(left) - max(1, ceil(chunk * len(left)))
        take = alone.argsort(stable=True)[: len(left) - max(keep, stay - stay % multiple)]
        gone = places[take].flatten()
        costs.append(alone[take[0]] if len(take) == 1 else removal_costs(wide, inverse, gone[None])[0])
        steps.append(left[take])
        left, places, wide, inverse = _without(take, gone, left, places, wide, inverse)
    return RemovalPath(tuple(steps), torch.stack(costs) if costs else torch.zeros(0, dtype=torch.float64))


def _without(
    take: Tensor, gone: Tensor, left: Tensor, places: Tensor, wide: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take groups ``take`` out of the lists and their inputs ``gone`` out of the matrices, equation (U), in place."""
    stays = torch.ones(len(inverse), dtype=torch.bool).index_fill(0, gone, False)
    groups = torch.ones(len(left), dtype=torch.bool).index_fill(0, take, False)
    number, kept = stays.cumsum(0) - 1, stays.nonzero()[:, 0]  # of an input among those that stay
    rows, columns, solved = inverse[gone][:, kept], wide[:, gone], _solved(inverse, gone)[:, kept]
    inverse = _compacted(inverse, kept, kept).addmm_(rows.T, solved, alpha=-1)
    wide = _compacted(wide, torch.arange(len(wide)), kept).addmm_(columns, solved, alpha=-1)
    return left[groups], number[places[groups]], wide, inverse


def _compacted(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Move some rows and columns, both rising, of a contiguous matrix to the beginning of its memory; return these."""
    flat, width = matrix.view(-1), len(columns)
    for start in range(0, len(rows), _ROWS):  # what is written never reaches what is still to be read
        part = matrix[rows[start : start + _ROWS]][:, columns]
        flat[start * width : start * width + part.numel()] = part.view(-1)
    return flat[: len(rows) * width].view(len(rows), width)


def cheapest_first(costs: Mapping[str, Tensor], prices: Mapping[str, Tensor], saving: float) -> dict[str, int]:
    """Return how many steps every path goes, so that at least ``saving`` is saved: least cost per price first.

    Steps of a path are joined so that cost / price never falls, along the lower convex hull of their sums. Then this
    order is the best one.

    Args:
        costs: by path float64 [steps], each step's addition to the loss on the scale of (M), not negative.
        prices: by path float64 [steps], each step's saving: parameters or FLOPs, above 0.

    Raises:
        UserError: all steps together save less.
    """
    queue, most = list[tuple[float, str, int, float]](), 0.0
    for name in costs:
        cost, price = ([0.0, *values[name].cumsum(0).tolist()] for values in (costs, prices))

        def slope(a: int, b: int, cost: list[float] = cost, price: list[float] = price) -> float:
            return (cost[b] - cost[a]) / (price[b] - price[a])

        corners = [0]
        for point in range(1, len(cost)):
            while len(corners) > 1 and slope(corners[-1], point) <= slope(corners[-2], corners[-1]):
                corners.pop()
            corners.append(point)
        queue += [(slope(a, b), name, b, price[b] - price[a]) for a, b in pairwise(corners)]
        most += price[-1]
    if saving > most:
        raise UserError(f"budget: {saving:g} cannot be saved; the largest saving is {most:g}")
    taken = dict.fromkeys(costs, 0)
    for _, name, steps, saved in sorted(queue):
        if saving <= 0:
            break
        taken[name], saving = steps, saving - saved
    return taken


def uniform_options(losses: Sequence[Tensor], savings: Sequence[Tensor], saving: float) -> list[int] | None:
    """Return an option for every group of layers, so that together they save ``saving`` at the least loss, or None.

    Layers of a model that keep alike numbers of units (all attentions, all feed-forward networks) are a group, whose
    options are these numbers.

    Args:
        losses: per group float64 [options], each one's addition to the loss.
        savings: per group float64 [options], each one's saving.
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
