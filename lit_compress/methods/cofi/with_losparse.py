"""LoSparse inside CoFi: gates remove layers and heads, LoSparse prunes rows of the remaining matrices.

Li et al. 2023, LoSparse, https://arxiv.org/abs/2306.11222, section 4.6 and Appendix F: "we replace the third level
masks as our method and keep the first and second level masks. Specifically, we first decompose the pre-trained weight
matrices into low-rank and sparse matrices. Then, we follow the same training approach as CoFi."

    ratio = ratio_CoFi * ratio_LoSparse                              (App. F: 0.10 = 0.20 * 0.50)

``density`` is that product, measured on the stored weights; ``prune.share`` is ratio_LoSparse. Attentions, feed-forward
networks and heads have gates (cofi.py); rows are pruned as in stages/rows.py.

Choices where the paper is silent:
    - Only rows of open heads and sub-layers are ranked: rows of closed ones have no gradient, would be pruned first,
      and the others would stay whole. The gates are read again for the pruning, at most every ``interval`` steps. Rows
      of closed heads and sub-layers are not pruned: they may open again.
    - At the end the number of rows is such that factors, after their slicing, and rows together meet the product.
    - The factors get 5 % of the matrices, so the rows 45 %; pruning of rows begins with the gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_compress.layers.training.gated import GatedLinear
from lit_compress.methods.cofi.cofi import CoFi, CoFiDistillation, CoFiPruning, GatedPruning
from lit_compress.models.cut import SUBLAYER_GATES, close_empty_sublayers
from lit_compress.models.outline import keep_rows_evenly
from lit_compress.models.record import join_parts, parts_of
from lit_compress.models.sites import Model, find_sites, of_kind, sublayers
from lit_compress.models.surgery import Structure
from lit_compress.numerics.foreach import joined, on_cpu
from lit_compress.numerics.masks import keep_count, select_rows, select_units
from lit_compress.stages.base import Stage
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.stages.rows import RowPruning, RowSparsePruning
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.sharding import whole

COARSE = ("attention_layer", "ffn_layer", "heads")


@dataclass(frozen=True)
class RowsInGates(CoFiPruning, RowPruning):
    """How gates are trained and rows are pruned.

    Args:
        share: density of LoSparse within the parts with open gates; the gates keep model.density / share. None: 0.5, as
            in the paper, or the square root of a model.density above 0.25.
        low_rank: share of the matrices' parameters that the factors get.
    """

    share: float | None = None
    low_rank: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prune.share", above=0, below=1, hint="usual: 0.5")
        if not 0 < self.low_rank < (self.share or 0.5):
            raise UserError(
                f"prune.low_rank: {self.low_rank} is not between 0 and prune.share {self.share or 0.5}; usual: 0.05"
            )


class _Read(NamedTuple):
    """The sizes of the open matrices, on the host."""

    columns: list[int]  # open inputs of each site
    dense: int  # parameters of all open matrices
    factors: int  # of their factors
    least: int  # stored without any row: a matrix is stored whole where that is less than factors and rows
    added: Tensor  # int64 [rows of all sites], by the best, second best, ... row of each site


class OpenRows(RowSparsePruning):
    """The pruning of the rows of open heads and sub-layers.

    Args:
        settings: schedule and score of the pruning, and the share of the factors.
        share: final density within the open heads and sub-layers.
        density: final density of all matrices.
        gates: the stage that says which units are open.

    Attributes:
        known: bool [1], whether the gates have been read.
        columns: int [sites], open inputs of each site.
    """

    known: Tensor
    columns: Tensor

    def __init__(self, settings: RowsInGates, share: float, density: float, gates: RowsAndGates) -> None:
        super().__init__(settings, share, settings.low_rank, gates.round_to)
        self.whole, self._gates = density, (gates,)  # a tuple hides the stage from the modules of this one

    def layers(self, net: Model) -> list[Any]:
        """Return the layers with factors and sparse matrices, those inside gated layers too."""
        return [layer.layer if isinstance(layer, GatedLinear) else layer for layer in super().layers(net)]

    def attach(self, net: Model) -> None:
        """Also make the buffers for the open rows and the number of open columns of every site."""
        super().attach(net)
        self._sites = [site.name for site in find_sites(net)]
        self._parts = {kind: of_kind(sublayers(net), kind) for kind in ("attention", "ffn")}
        self._sizes = [(layer.out_features, layer.in_features) for layer in self.layers(net)]
        self.register_buffer("known", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("columns", torch.tensor([size[1] for size in self._sizes]))
        for i, (rows, _) in enumerate(self._sizes):
            self.register_buffer(f"open_{i}", torch.ones(rows, dtype=torch.bool))
        self._read: _Read | None = None

    @property
    def open(self) -> list[Tensor]:
        """Which rows of each site are open, bool [out], unsharded on every rank."""
        return [self.get_buffer(f"open_{i}") for i in range(len(self._sizes))]

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Read from the gates which rows and columns are open."""
        gates, columns = self._gates[0].open_units(step), [size[1] for size in self._sizes]
        open_ = [torch.ones(rows, dtype=torch.bool) for rows, _ in self._sizes]
        for kind, parts in self._parts.items():
            for group, part in enumerate(parts):
                for role, name in part.sites.items():
                    i = self._sites.index(name)
                    rows = self._sizes[i][0]
                    open_[i] &= gates[SUBLAYER_GATES[kind][0]][group]
                    if kind == "attention":
                        units = gates["heads"][group]
                        if role == "o":
                            columns[i] = int(units.sum()) * (columns[i] // len(units))
                        else:
                            copies = len(parts_of(role))
                            width = rows // len(units) // copies
                            open_[i] &= join_parts(role, [units.repeat_interleave(width)] * copies, width)
        sent = joined(open_).to(self.columns.device)
        torch._foreach_copy_(self.open, sent.split([rows for rows, _ in self._sizes]))
        self.columns.copy_(torch.tensor(columns))
        self.known.fill_(True)
        self._read = self._known(open_, columns)

    @torch.no_grad()
    def _zero(self, step: int) -> None:
        if (step - 1) % self.settings.interval == 0 or not (self._read or self.known):
            self.refresh(step)
        self.prune(step)

    @torch.no_grad()
    def prune(self, step: int) -> None:
        """Zero the open rows with the lowest scores, as many as the schedule says; the host waits for nothing."""
        if self._read is None:  # the stage continues from a checkpoint
            self._read = self._known(on_cpu(self.open), self.columns.tolist())
        read, open_ = self._read, joined(self.open)
        scores = joined([whole(score) for score in self.scores]).masked_fill(~open_, -torch.inf)
        goal = (
            keep_count(self.whole, self.budget.total)
            if self._gates[0].arrived(step)
            else round(self.density * read.dense)
        )
        left = self.target(step, 0.0)
        sizes = [rows for rows, _ in self._sizes]
        if left == 0:
            keep = select_units(scores, sizes, read.added, goal - read.least)
        else:
            budget = round(left * read.dense + (1 - left) * max(0, goal - read.factors))
            keep = joined(select_rows(scores.split(sizes), read.columns, budget))
        self._keep((keep | ~open_).split(sizes))

    def _known(self, open_: list[Tensor], columns: list[int]) -> _Read:
        """Return the sizes that follow from the open rows and columns of every site, on the CPU."""
        dense = factors = least = 0
        added = []
        for name, rows, cost in zip(self._sites, open_, columns, strict=True):
            count = int(rows.sum())
            rank, whole_ = self.budget.ranks[name], count * cost
            factor, kept = rank * (count + cost) if count else 0, torch.arange(len(rows) + 1).clamp(max=count)
            stored = (factor + kept * cost).clamp(max=whole_)
            added.append(stored.diff())
            dense, factors, least = dense + whole_, factors + factor, least + int(stored[0])
        return _Read(columns, dense, factors, least, joined(added).to(self.columns.device))


class RowsAndGates(GatedPruning):
    """The stage ``prune``: train weights and gates, prune rows of open heads and sub-layers, then remove closed
    ones.
    """

    settings: RowsInGates
    finest = "heads"

    def __init__(
        self, settings: RowsInGates, density: float, distillation: CoFiDistillation, round_to: int | None = None
    ) -> None:
        share = settings.share or max(0.5, density**0.5)
        if share <= density < 1:
            raise UserError(
                f"prune.share: {share} leaves the gates {density / share:.2f} of the weights; it must be above "
                f"model.density {density}, e.g. {(1 + density) / 2:g}"
            )
        super().__init__(settings, density / share, distillation, round_to)
        self.rows = OpenRows(settings, share, density, self)

    def names(self, net: Model) -> tuple[str, ...]:
        """Return the names of the gates: rows are pruned in place of neurons."""
        return COARSE

    @property
    def together(self) -> tuple[Stage, ...]:
        """The gates, then the rows, which read them."""
        return self, self.rows

    def outline(self, net: Model) -> Model:
        """Return ``net`` with fewer heads, and with factors and some rows of the remaining matrices."""
        budget = self.rows.budget_of(net)
        total = keep_count(self.rows.whole, budget.total)
        return keep_rows_evenly(super().outline(net), budget.ranks, total)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.rows.whole == 1

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Decompose the matrices, then put gates around them."""
        return super().begin(self.rows.begin(net, method, structure), method, structure)

    def set_total_steps(self, total_steps: int) -> None:
        """Also turn the fractions of the rows' schedule into steps."""
        super().set_total_steps(total_steps)
        self.rows.set_total_steps(total_steps)

    def before_validation(self, net: Model, step: int) -> None:
        """At the budget, prune the rows again for the gates as they are now."""
        super().before_validation(net, step)
        if self.at_budget(step):
            self.rows.refresh(step)
            self.rows.prune(step)

    def at_budget(self, step: int) -> bool:
        """Return whether gates and rows both meet their budgets."""
        return super().at_budget(step) and self.rows.at_budget(step)

    def open_units(self, step: int) -> dict[str, Tensor]:
        """Return by gate which units are open after ``step``, bool [groups, units]."""
        return {
            name: z > 0
            for name, z in close_empty_sublayers({n: m.float() for n, m in self.kept_masks(step).items()}).items()
        }


class CoFiLoSparse(CoFi):
    """Prune layers and heads by gates, and rows of the remaining matrices by sensitivity.

    Args:
        prune: training of weights and gates, with pruning of rows.
    """

    pruning = RowsAndGates
    usual_density = 0.1
    prune: RowsInGates = RowsInGates(epochs=19, warmup=0.0, target_warmup=0.1)
