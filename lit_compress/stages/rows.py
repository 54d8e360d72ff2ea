"""Iterative pruning of rows by sensitivity: LoSparse prunes its sparse matrix so, ITP W itself.

Li, Yu, Zhang, Liang, He, Chen, Zhao 2023, "LoSparse", sections 2.2 and 3.2; W = left @ right + S, and S = W for ITP.

    Eqs. 2-4   Gamma_i = mean over the row i of S of a moving average of |s dL/ds|         numerics/importance.py
    Eq. 9      after the step: a row stays if its Gamma is among the top p_t, else it is zeroed   numerics/masks.py
    schedule   p_t = 1 until t_i, then cubic down to p_T at T - t_f, p_T from there          numerics/schedules.py
    density    the weights that the export stores for the kept rows                          models/row_sizes.py

Deviations, and open points of the paper (the published numbers come from the authors' code):
    - The printed schedule exceeds 1 after t_i and jumps at T - t_f; the code's continuous cubic is meant.
    - The gradient is multiplied with the weight after the step, as in the code; the paper takes the one before. The
      gradient is the one before clipping (neither clips).
    - ``interval``: the code averages windows of 10 steps and prunes once a window, in the last t_f steps after every
      step; 1 is the paper's.
    - "Top p" is a share of the parameters, as in the code; a share of neurons would not give that size. The stored
      parameters count: without the columns of removed neurons, without the other rows of heads that have no values,
      and not more than the matrix. So the file has the density. A head that does not fit any more is passed over for
      the next rows.
    - Rows are zeroed, not masked: they keep their gradient and AdamW's averages, and may come back.
    - p is a function of the completed steps, here as everywhere; the code is one step behind. It trains most steps
      without the backbone's dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lit_compress.layers import LowRankSparseLinear
from lit_compress.models.outline import keep_rows_evenly
from lit_compress.models.row_sizes import RowSizes
from lit_compress.models.sites import Model, find_sites, site_shapes, size_at
from lit_compress.models.surgery import Structure, factorize
from lit_compress.numerics.decompose import weighted_svd
from lit_compress.numerics.foreach import joined
from lit_compress.numerics.importance import row_sensitivity, update_row_average_
from lit_compress.numerics.masks import keep_count, keep_rows_, select_rows
from lit_compress.numerics.ranks import break_even_rank, rank_for_density, rounded
from lit_compress.stages.base import Limits
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.rank_rule import below_one_rank
from lit_compress.stages.unstructured import CubicSchedule, CubicStage
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import Shards, own_rows, whole


@dataclass(frozen=True)
class RowPruning(CubicSchedule):
    """How rows (neurons) are pruned while the model is trained.

    Args:
        interval: optimizer steps over which a score is averaged, and between two prunings before the last t_f steps.
        beta: weight of the old value in the score's moving average.
    """

    start: float = 0.05
    interval: int = 10
    beta: float = 0.85
    init: Literal["pretrained", "finetuned"] = "pretrained"
    limits: ClassVar[Limits] = {"prune.interval": {"low": 1}, "prune.beta": {"low": 0, "below": 1}}


def balanced(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return P sqrt(Sigma), sqrt(Sigma) Q^T of the largest singular values (Eqs. 6-7)."""
    return weighted_svd(weight, side="balanced", name=name, components=rank).factors(rank)


class RowBudget(NamedTuple):
    """The budget of factors and rows of a model at a density."""

    ranks: dict[str, int]  # of the factors, by site
    factors: int  # number of their parameters
    total: int  # weights of all sites
    final: float  # p_T, the share of the weights that is in kept rows at the end


class RowSparsePruning(CubicStage):
    """The stage ``prune``: train, average sensitivities, zero the rows that are not among the top p(t).

    Args:
        density: final density of the sites, factors included.
        low_rank: share of the parameters that the factors get, at most ``density``; 0 prunes W itself.
        round_to: ranks of the factors are multiples of it; None: there are none.
    """

    settings: RowPruning
    decided_by_data = repeatable = True
    # rows are those that scores choose: their layer fills its product up to multiples of 8 by itself

    def __init__(
        self, settings: RowPruning, density: float, low_rank: float = 0.0, round_to: int | None = None
    ) -> None:
        super().__init__(settings, density)
        self.round_to, self.low_rank = round_to, min(low_rank, density)
        self.budget = RowBudget({}, 0, 1, density - self.low_rank)  # until a model gives the exact one

    def check(self, net: Model) -> None:
        """Refuse a density below one rank of every matrix, if there are factors."""
        shapes = site_shapes(net).values()
        least = sum(map(sum, shapes)) / sum(out * inner for out, inner in shapes)
        if self.low_rank > 0 and self.density < least:
            raise below_one_rank(self.density, least)

    def outline(self, net: Model) -> Model:
        """Return ``net`` with factors and some rows of every matrix; which rows is decided by training."""
        budget = self.budget_of(net)
        total = budget.factors + round(budget.final * budget.total)
        return keep_rows_evenly(net, budget.ranks, total)

    def budget_of(self, net: Model) -> RowBudget:
        """Return the budget of factors and rows of the dense ``net``; only shapes are read."""
        shapes = {site.name: size_at(net, site.name) for site in find_sites(net)}
        total = sum(out * inner for out, inner in shapes.values())
        budget = keep_count(self.density, total)

        def size(ranks: dict[str, int]) -> int:
            return sum(rank * sum(shapes[name]) for name, rank in ranks.items())

        ranks = {name: _rank(self.low_rank, *shape) for name, shape in shapes.items()}
        if size(ranks) > budget:  # no room to round up
            ranks = {name: rank_for_density(self.low_rank, *shape) for name, shape in shapes.items()}
        ranks = {name: rounded(rank, self.round_to or 1) for name, rank in ranks.items()}
        final = max(0, budget - size(ranks)) / total if self.low_rank < self.density else 0.0
        return RowBudget(ranks, size(ranks), total, final)

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Decompose every site into factors and a sparse matrix (Eqs. 6-8)."""
        self.budget = self.budget_of(net)
        self.row_sizes = RowSizes(net, self.budget.ranks)
        factors = balanced if structure is None and self.low_rank else None
        return factorize(net, self.budget.ranks, factors, LowRankSparseLinear)

    def attach(self, net: Model) -> None:
        """Make the buffers of the score, two float32 numbers per row, sharded like the rows."""
        self._weights = [layer.sparse for layer in self.layers(net)]
        for i, weight in enumerate(self._weights):
            for name in ("average", "window"):
                self.register_buffer(f"{name}_{i}", torch.zeros_like(weight.detach().select(1, 0), dtype=torch.float32))
        self._shards = Shards(next(net.parameters()))
        self._whole: list[Tensor | None] | None = None  # gradients before they were clipped

    def layers(self, net: Model) -> list[Any]:
        """Return the modules at the sites."""
        return [net.get_submodule(site.name) for site in find_sites(net)]

    @property
    def scores(self) -> list[Tensor]:
        """Gamma, the importance of each row: float32 [out] per site."""
        return [self.get_buffer(f"average_{i}") for i in range(len(self._weights))]

    @property
    def windows(self) -> list[Tensor]:
        """Mean sensitivity in the current window, not yet in the score: float32 [out] per site."""
        return [self.get_buffer(f"window_{i}") for i in range(len(self._weights))]

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fractions of the steps into steps; a UserError if rows are final before the first scores."""
        super().set_total_steps(total_steps)
        interval = self.settings.interval
        if total_steps <= interval:
            valid = f"valid: at most {total_steps - 1}" if total_steps > 1 else "train longer"
            raise UserError(
                f"prune.interval: the first scores are known after {interval} steps, the stage has {total_steps}; "
                f"{valid}"
            )

    def at_budget(self, step: int) -> bool:
        """Return whether the schedule has arrived at the final density."""
        return step >= max(self.total_steps - self._end, self.settings.interval + 1)

    def before_clipping(self, net: Model) -> None:
        """Copy the unclipped gradients: clipping would give steps different weights in the average."""
        grads = [weight.grad for weight in self._weights if weight.grad is not None]
        copies = iter(torch._foreach_mul(grads, 1.0)) if grads else iter(())
        self._whole = [None if weight.grad is None else next(copies) for weight in self._weights]

    def after_step(self, net: Model, step: int) -> None:
        """Add the step's sensitivity to the score (Eqs. 2-4); zero the rows that are not in the top p (Eq. 9)."""
        terms = row_sensitivity(self._weights, self._whole or [weight.grad for weight in self._weights])
        self._whole = None
        interval = self.settings.interval
        if any(weight.grad is not None for weight in self._weights):  # else the step is left out
            update_row_average_(self.scores, self.windows, terms, step - 1, self.settings.beta, interval)
        if step > max(self._start, interval) and ((step - 1) % interval == 0 or self.at_budget(step)):
            self._zero(step)

    @torch.no_grad()
    def _zero(self, step: int) -> None:
        budget = self.budget.factors + round(self.target(step, self.budget.final) * self.budget.total)
        keep = select_rows([whole(score) for score in self.scores], self.row_sizes.choose, budget)
        self._keep(keep)

    def _keep(self, rows: Sequence[Tensor]) -> None:
        """Zero the other rows; ``rows`` are bool [out] per site, unsharded."""
        keep_rows_(self._weights, [own_rows(some, self._shards.place) for some in rows])

    def stored(self) -> Tensor:
        """Return the number of weights that would be exported now."""
        return self.row_sizes.stored(joined([whole(weight.detach().ne(0).any(1)) for weight in self._weights]))

    @torch.no_grad()
    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log target and achieved density.

        Between two prunings, rows that training has moved away from zero count as kept.
        """
        total, factors = self.budget.total, self.budget.factors / self.budget.total
        return {"target": factors + self.target(step, self.budget.final), "density": int(self.stored()) / total}


def _rank(share: float, out_features: int, in_features: int) -> int:
    """Return ceil(share * out * in / (out + in)), the authors' rule."""
    return ceil(share * break_even_rank(out_features, in_features) - 1e-9)
