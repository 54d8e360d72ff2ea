"""LoSparse inside CoFi: layers and heads go by gates, what is left of the matrices by rows.

Li et al. 2023, LoSparse, https://arxiv.org/abs/2306.11222, section 4.6 and Appendix F: "we replace the third level
masks as our method and keep the first and second level masks. Specifically, we first decompose the pre-trained weight
matrices into low-rank and sparse matrices. Then, we follow the same training approach as CoFi."

    ratio = ratio_CoFi * ratio_LoSparse                              (App. F: 0.10 = 0.20 * 0.50)

``density`` is that product, measured on what is stored; ``prune.share`` is ratio_LoSparse. The gates are those of
attentions, feed-forward networks and heads (cofi.py); the rows go as in row_pruning_stage.py.

Choices where the paper is silent:
    - Rows compete only within heads and sub-layers that are open: rows of closed ones have no gradient, would go first,
      and the others would stay whole. Which are open is asked anew at every pruning, at most every ``interval`` steps.
      Rows of closed ones are left alone, they may open again.
    - The last rows are chosen so that factors, after their slicing, and rows together make the product.
    - The factors get 5 % of the matrices, so the rows 45 %; pruning of rows begins with the gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.families import find_sites
from lit_compress.gating import Gate, canonical, gate_net, of_kind
from lit_compress.layers import GatedLinear
from lit_compress.masks import keep_count, select_rows
from lit_compress.methods.base import Method
from lit_compress.methods.cofi import CoFiPruning, Distilling, GatedPruning, Retraining
from lit_compress.methods.distillation import MatchedDistillation
from lit_compress.methods.row_pruning_stage import RowPruning, RowSparsePruning
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.schedules import cubic
from lit_compress.sublayers import sublayers
from lit_compress.surgery import Structure
from lit_compress.tensors import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _coarse() -> list[str]:
    return ["attention", "ffn", "heads"]


@dataclass(frozen=True)
class RowsInGates(CoFiPruning):
    """How gates learn and rows go.

    Args:
        gates: of ``attention``, ``ffn``, ``heads``.
        share: density of LoSparse within what the gates leave; theirs is model.density / share. None: 0.5, as in the
            paper, or the square root of a model.density above 0.25.
        low_rank: share of the matrices' parameters that the factors get.
        start: t_i, before rows begin to go; below 1 a fraction of the steps, else optimizer steps.
        end: t_f, at the final share; likewise.
        interval: optimizer steps of a window of the score, and between two prunings before the last t_f.
        beta: share of the past in the score's moving average.
    """

    gates: list[str] = field(default_factory=_coarse)
    share: float | None = None
    low_rank: float = 0.05
    start: float = 0.05
    end: float = 0.3
    interval: int = 10
    beta: float = 0.85

    def __post_init__(self) -> None:
        super().__post_init__()
        for gate in self.gates or ["neurons"]:
            if gate not in _coarse():
                raise UserError(f"prune.gates: '{gate}' is what the rows take care of; valid: {', '.join(_coarse())}")
        if self.share is not None and not 0 < self.share < 1:
            raise UserError(f"prune.share: {self.share} is not between 0 and 1; usual: 0.5")
        if not 0 < self.low_rank < (self.share or 0.5):
            raise UserError(
                f"prune.low_rank: {self.low_rank} is not between 0 and prune.share {self.share or 0.5}; usual: 0.05"
            )
        self.rows()

    def rows(self) -> RowPruning:
        """Return how the rows go.

        Raises:
            UserError: one of the settings is out of its range.
        """
        return RowPruning(start=self.start, end=self.end, interval=self.interval, beta=self.beta)


class OpenRows(RowSparsePruning):
    """Pruning of rows of what gates leave open.

    Args:
        settings: how.
        share: density within what is open.
        low_rank: share of the matrices' parameters that the factors get.
        density: of all matrices' weights, at the end.
        ask: step -> name of a gate -> bool [groups, units], which are open.
        arrived: step -> whether that is their final number.
    """

    known: Tensor
    columns: Tensor

    def __init__(
        self,
        settings: RowPruning,
        share: float,
        low_rank: float,
        density: float,
        ask: Callable[[int], dict[str, Tensor]],
        arrived: Callable[[int], bool],
    ) -> None:
        super().__init__(settings, share, low_rank)
        self.whole, self.ask, self.arrived = density, ask, arrived

    def layers(self, net: PreTrainedModel) -> list[nn.Module]:
        """Look under the gates."""
        return [layer.layer if isinstance(layer, GatedLinear) else layer for layer in super().layers(net)]

    def attach(self, net: PreTrainedModel) -> None:
        """Also remember which rows and how many columns are open."""
        super().attach(net)
        self._sites = [site.name for site in find_sites(net)]
        self._parts = {kind: of_kind(sublayers(net), kind) for kind in ("attention", "ffn")}
        self._sizes = [(layer.out_features, layer.in_features) for layer in self.layers(net)]
        self.register_buffer("known", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("columns", torch.tensor([size[1] for size in self._sizes]))
        for i, (rows, _) in enumerate(self._sizes):
            self.register_buffer(f"open_{i}", torch.ones(rows, dtype=torch.bool))

    @property
    def open(self) -> list[Tensor]:
        """Which rows of a site are open, bool [out] each, whole on every rank."""
        return [self.get_buffer(f"open_{i}") for i in range(len(self._sizes))]

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Ask the gates which rows and columns are open."""
        gates = self.ask(step)
        for kind, parts in self._parts.items():
            for group, part in enumerate(parts):
                for role, name in part.sites.items():
                    i = self._sites.index(name)
                    rows, columns = self._sizes[i]
                    open_ = torch.full((rows,), bool(gates[kind][group]) if kind in gates else True)
                    if kind == "attention" and "heads" in gates:
                        units = gates["heads"][group]
                        if role == "o":
                            columns = int(units.sum()) * (columns // len(units))
                        else:
                            open_ &= units.repeat_interleave(rows // len(units))
                    self.open[i].copy_(open_)
                    self.columns[i] = columns
        self.known.fill_(True)

    @torch.no_grad()
    def _zero(self, step: int) -> None:
        if (step - 1) % self.settings.interval == 0 or not self.known:
            self.refresh(step)
        self.prune(step)

    @torch.no_grad()
    def prune(self, step: int) -> None:
        """Zero the open rows that are not among the best, as many as the schedule says."""
        open_, costs = self.open, self.columns.tolist()
        counts = torch.stack([rows.sum() for rows in open_]).tolist()
        dense = [rows * columns for rows, columns in zip(counts, costs, strict=True)]
        ranks = [self.ranks[name] for name in self._sites]
        factors = [
            rank * (rows + columns) if rows else 0 for rank, rows, columns in zip(ranks, counts, costs, strict=True)
        ]
        goal = keep_count(self.whole, self._total) if self.arrived(step) else round(self.density * sum(dense))
        left = cubic(step, self.total_steps, self._start, self._end, 0.0)
        budget = round(left * sum(dense) + (1 - left) * max(0, goal - sum(factors)))
        keep = self._select(budget, costs, open_)
        for _ in range(8 if left == 0 else 0):  # a matrix is stored whole where that is less than factors and rows
            rows_kept = self._count(keep, open_)
            stored = sum(min(f + k * c, d) for f, k, c, d in zip(factors, rows_kept, costs, dense, strict=True))
            if goal - stored < max(costs) or rows_kept == counts:
                break
            budget += goal - stored
            keep = self._select(budget, costs, open_)
        for weight, kept, rows in zip(self._weights, keep, open_, strict=True):
            local(weight).masked_fill_((~kept & self._mine(rows))[:, None], 0.0)

    def _select(self, budget: int, costs: list[int], open_: list[Tensor]) -> list[Tensor]:
        scores = [
            local(score).masked_fill(~self._mine(rows), -torch.inf)
            for score, rows in zip(self.scores, open_, strict=True)
        ]
        return select_rows(scores, costs, budget, self._reduce, self._shard)

    def _count(self, keep: list[Tensor], open_: list[Tensor]) -> list[int]:
        counts = torch.stack([(kept & self._mine(rows)).sum() for kept, rows in zip(keep, open_, strict=True)])
        if self._reduce:
            self._reduce(counts)
        return counts.tolist()

    def _mine(self, rows: Tensor) -> Tensor:
        """Return the part of ``rows`` [out] that this rank holds: FSDP2 cuts dim 0 as torch.chunk does."""
        rank, ranks = self._shard
        size = -(-len(rows) // ranks)
        return rows[rank * size : (rank + 1) * size]


class RowsAndGates(GatedPruning):
    """Train weights and gates; prune rows of what is open; leave the cut net.

    Args:
        settings: how.
        density: final fraction of the weights.
        distillation: how the teacher is listened to.
    """

    settings: RowsInGates

    def __init__(self, settings: RowsInGates, density: float, distillation: MatchedDistillation) -> None:
        share = settings.share or max(0.5, density**0.5)
        if density < 1 and density >= share:
            raise UserError(
                f"prune.share: {share} leaves the gates {density / share:.2f} of the weights; it must be above "
                f"model.density {density}, e.g. {(1 + density) / 2:g}"
            )
        super().__init__(settings, density / share, distillation)
        self.rows = OpenRows(settings.rows(), share, settings.low_rank, density, self._open, self._arrived)

    def check(self, net: PreTrainedModel) -> None:
        """Also plan the ranks."""
        super().check(net)
        self.rows.check(net)

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Decompose every site, then put the gates in place."""
        self._given = structure
        return super().build(method, previous, structure)

    def replace(self, net: PreTrainedModel, names: list[Gate]) -> None:
        """Put factors and sparse parts under the gates."""
        self.rows.decompose(net, self._given)
        gate_net(net, names)

    def attach(self, net: PreTrainedModel) -> None:
        """Also make the rows' state."""
        super().attach(net)
        if self.gates:
            self.rows.attach(net)

    def begin(self, total_steps: int) -> None:
        """Also turn the rows' fractions into steps."""
        super().begin(total_steps)
        self.rows.begin(total_steps)

    def before_step(self, net: PreTrainedModel) -> None:
        """Also let the rows see the gradients."""
        super().before_step(net)
        if self.gates:
            self.rows.before_step(net)

    def after_step(self, net: PreTrainedModel, step: int) -> None:
        """Also prune rows."""
        super().after_step(net, step)
        if self.gates:
            self.rows.after_step(net, step)

    def before_validation(self, net: PreTrainedModel, step: int) -> None:
        """Make the rows fit the gates as they are now."""
        super().before_validation(net, step)
        if self.gates and self.at_budget(step):
            self.rows.refresh(step)
            self.rows.prune(step)

    def at_budget(self, step: int) -> bool:
        """Say whether gates and rows have arrived."""
        return super().at_budget(step) and (not self.gates or self.rows.at_budget(step))

    def _open(self, step: int) -> dict[str, Tensor]:
        """Return which gates are open after ``step``."""
        return {name: z > 0 for name, z in canonical({n: m.float() for n, m in self.kept(step).items()}).items()}

    def _arrived(self, step: int) -> bool:
        """Say whether as many gates are open as at the end."""
        return step >= self._warmup


class CoFiLoSparse(Method):
    """Prune layers and heads by gates, rows of what is left by sensitivity.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; of gates and rows
            together.
        teacher: folder of a net already fine-tuned on the task, e.g. ``runs/x/dense/net``; it takes the place
            of the dense stage.
        dense: fine-tuning of the backbone.
        distil: the backbone learns from the dense net, before it is pruned.
        prune: gated training.
        retrain: training of the cut net.
        distillation: how the dense net is listened to.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = "bert-base-uncased",
        density: float = 0.1,
        teacher: str | None = None,
        dense: Training = Training(),
        distil: Training = Training(epochs=1, warmup=0.0),
        prune: RowsInGates = RowsInGates(epochs=19, warmup=0.0, target_warmup=0.1),
        retrain: Training = Training(epochs=20),
        distillation: MatchedDistillation = MatchedDistillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.distil, self.prune, self.retrain = dense, distil, prune, retrain
        self.matched = distillation

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), distil (from the backbone), prune, retrain."""
        distil = [Distilling(self.distil, self.matched)] if self.prune.init == "pretrained" else []
        prune = RowsAndGates(self.prune, self.density, self.matched)
        return [*self.first(self.dense), *distil, prune, Retraining(self.retrain, self.matched)]
