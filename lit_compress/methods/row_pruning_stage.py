"""Iterative pruning of output neurons by sensitivity: what LoSparse does to its sparse part and ITP to W itself.

Li, Yu, Zhang, Liang, He, Chen, Zhao 2023, "LoSparse", sections 2.2 and 3.2; W = left @ right + S, and S = W for ITP.

    Eqs. 2-4   Gamma_i = mean over the row i of S of a moving average of |s dL/ds|         importance.py
    Eq. 9      after the step: a row stays if it is among the best p_t, else it is set to zero    masks.py
    schedule   p_t = 1 until t_i, then cubic down to p_T at T - t_f, p_T from there          schedules.py

Deviations, and what the paper leaves open (the published numbers come from the authors' code):
    - The printed schedule exceeds 1 after t_i and jumps at T - t_f; the code's continuous cubic is meant.
    - ``score_point``: the code multiplies the gradient with the weight after the step, the paper with the one before.
    - ``interval``: the code averages windows of 10 steps and prunes once a window, in the last t_f steps after every
      step; 1 is the paper's.
    - "Top p" is a share of the parameters, as in the code; of neurons, it would not give the size it says.
    - Rows are zeroed, not masked: they keep their gradient and AdamW's averages, and may come back.
    - p is read at the completed steps, here as everywhere; the code is one step behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lit_compress.decompose import decompose
from lit_compress.errors import UserError
from lit_compress.families import find_sites
from lit_compress.importance import row_sensitivity, update_row_average_
from lit_compress.layers import LowRankSparseLinear
from lit_compress.masks import keep_count, select_rows
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.ranks import break_even_rank, rank_for_density
from lit_compress.schedules import cubic
from lit_compress.surgery import Structure, factorize
from lit_compress.tensors import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RowPruning(Training):
    """How neurons are pruned while the net is trained.

    Args:
        start: t_i, before pruning begins; below 1 a fraction of the steps, else optimizer steps.
        end: t_f, at the final density; likewise.
        interval: optimizer steps of a window of the score, and between two prunings before the last t_f.
        beta: share of the past in the score's moving average.
        score_point: take |w g| with the weight ``after`` the step (the authors' code) or ``before`` it (their paper).
        init: start from the pre-trained backbone, as the paper does, or from the fine-tuned net.
        dropout: keep the backbone's dropout; the authors' code trains most steps without.
    """

    start: float = 0.05
    end: float = 0.3
    interval: int = 10
    beta: float = 0.85
    score_point: Literal["after", "before"] = "after"
    init: Literal["pretrained", "finetuned"] = "pretrained"
    dropout: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("start", self.start), ("end", self.end)):
            if value < 0 or (value >= 1 and value != int(value)):
                raise UserError(
                    f"prune.{name}: {value} is neither a fraction of the steps nor a number of them; "
                    f"nearest valid {max(0, round(value))}"
                )
        if self.start < 1 and self.end < 1 and self.start + self.end >= 1:
            raise UserError(
                f"prune.start + prune.end: {self.start} + {self.end} leave no step to prune; the sum must be below 1"
            )
        if self.interval < 1:
            raise UserError(f"prune.interval: {self.interval} is below 1, the smallest valid value")
        if not 0 <= self.beta < 1:
            raise UserError(f"prune.beta: {self.beta} is not in [0, 1); nearest valid {0.0 if self.beta < 0 else 0.99}")


def without_dropout(net: nn.Module) -> None:
    """Turn dropout off, of modules and of the functions that BART, OPT and Llama call with a probability."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


class RowSparsePruning(Stage):
    """Train, average sensitivities, zero the rows that fall out of the top p(t).

    Args:
        settings: how.
        density: of the sites at the end, factors included.
        low_rank: share of the parameters that the factors get, at most ``density``; 0 prunes W itself.
        ratio: ``exact``: factors and kept rows together have ``density``; ``nominal``: the rows have
            density - low_rank, although ranks are rounded up.
    """

    def __init__(
        self, settings: RowPruning, density: float, low_rank: float = 0.0, ratio: Literal["exact", "nominal"] = "exact"
    ) -> None:
        super().__init__("prune", settings)
        self.settings, self.density, self.low_rank, self.ratio = settings, density, min(low_rank, density), ratio
        self.from_backbone = settings.init == "pretrained"
        self._final = density - self.low_rank  # until a net gives the exact one

    def check(self, net: PreTrainedModel) -> None:
        """Learn the shapes, so that the schedule is checked with the right final density."""
        self._plan(net)

    def _plan(self, net: PreTrainedModel) -> None:
        """Set the ranks, the size of the factors, and p_T."""
        shapes = {s.name: tuple(net.get_submodule(s.name).weight.shape) for s in find_sites(net)}
        self._total = sum(out * inner for out, inner in shapes.values())
        budget = keep_count(self.density, self._total)

        def size() -> int:
            return sum(rank * sum(shapes[name]) for name, rank in self.ranks.items())

        self.ranks = {name: _rank(self.low_rank, *shape) for name, shape in shapes.items()}
        if self.ratio == "exact" and size() > budget:  # no room to round up
            self.ranks = {name: rank_for_density(self.low_rank, *shape) for name, shape in shapes.items()}
        self._factors = size()
        low_rank = self._factors if self.ratio == "exact" else round(self.low_rank * self._total)
        self._final = max(0, budget - low_rank) / self._total if self.low_rank < self.density else 0.0

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Decompose every site into factors and what they miss (Eqs. 6-8); at density 1 leave the net as it is."""
        net = super().build(method, previous, structure)
        self.decompose(net, structure)
        return net

    def decompose(self, net: PreTrainedModel, structure: Structure | None) -> None:
        """Put factors and what they miss into ``net``, in place; without values if a structure is given."""
        if not self.settings.dropout:
            without_dropout(net)
        self._plan(net)
        if self.density < 1:
            factors = None if structure is not None or not self.low_rank else _balanced
            factorize(net, self.ranks, factors, LowRankSparseLinear)

    def attach(self, net: PreTrainedModel) -> None:
        """Make the state of the score, two float32 numbers per row, sharded like the rows."""
        layers = self.layers(net)
        self._weights = [layer.sparse for layer in layers if isinstance(layer, LowRankSparseLinear)]
        for i, weight in enumerate(self._weights):
            for name in ("average", "window"):
                self.register_buffer(f"{name}_{i}", torch.zeros_like(weight.detach().select(1, 0), dtype=torch.float32))
        mesh = getattr(self._weights[0], "device_mesh", None) if self._weights else None
        self._group = None if mesh is None else mesh.get_group()
        self._shard = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        self._rows: Tensor | None = None  # the last selection; only logged, so it is not saved
        self._flips: Tensor | None = None

    def layers(self, net: PreTrainedModel) -> list[nn.Module]:
        """Return what stands at the sites."""
        return [net.get_submodule(site.name) for site in find_sites(net)]

    @property
    def scores(self) -> list[Tensor]:
        """Gamma, the importance of each row: float32 [out] per site."""
        return [self.get_buffer(f"average_{i}") for i in range(len(self._weights))]

    @property
    def windows(self) -> list[Tensor]:
        """Mean of the terms since the last window was folded: float32 [out] per site."""
        return [self.get_buffer(f"window_{i}") for i in range(len(self._weights))]

    def begin(self, total_steps: int) -> None:
        """Turn the fractions into steps.

        Raises:
            UserError: nothing is left between them.
        """
        super().begin(total_steps)
        self._start, self._end = (
            round(value * total_steps) if value < 1 else int(value)
            for value in (self.settings.start, self.settings.end)
        )
        self.kept(0)

    def kept(self, step: int) -> float:
        """Return p(step), the share of the parameters that is in kept rows."""
        return cubic(step, self.total_steps, self._start, self._end, self._final)

    def at_budget(self, step: int) -> bool:
        """Say whether the schedule has arrived at the final density."""
        return step >= self.total_steps - self._end

    def before_step(self, net: PreTrainedModel) -> None:
        """Take this step's term with the weights of the forward pass, if it is to be so."""
        if self.settings.score_point == "before":
            self._terms = row_sensitivity(self._weights, [weight.grad for weight in self._weights])

    def after_step(self, net: PreTrainedModel, step: int) -> None:
        """Take the term into the score (Eqs. 2-4); zero the rows that are not among the best (Eq. 9)."""
        if not self._weights:
            return
        if self.settings.score_point == "after":
            self._terms = row_sensitivity(self._weights, [weight.grad for weight in self._weights])
        interval = self.settings.interval
        update_row_average_(
            self.scores, self.windows, self._terms, step - 1, self.settings.beta, interval, self._reduce
        )
        if step > self._start and ((step - 1) % interval == 0 or self.at_budget(step)):
            self._zero(step)

    @torch.no_grad()
    def _zero(self, step: int) -> None:
        budget = round(self.kept(step) * self._total)
        costs = [weight.shape[1] for weight in self._weights]
        keep = select_rows(self.scores, costs, budget, self._reduce, self._shard)
        rows = torch.cat(keep)
        self._flips = None if self._rows is None else (rows != self._rows).sum()
        self._rows = rows
        for weight, rows in zip(self._weights, keep, strict=True):
            local(weight).masked_fill_(~rows[:, None], 0.0)

    @property
    def _reduce(self) -> Callable[[Tensor], object] | None:
        """Sum over the ranks that hold other rows; None where this rank has everything."""
        if self._group is None:
            return None
        return lambda values: torch.distributed.all_reduce(values, group=self._group)

    @torch.no_grad()
    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show target and achieved density, and how many rows changed sides between the last two selections.

        Between two prunings rows that were zeroed take part again.
        """
        if not self._weights:
            return {"target": 1.0, "density": 1.0}
        rows = torch.stack([local(w).ne(0).any(1).sum() * w.shape[1] for w in self._weights]).sum()
        if self._reduce:
            self._reduce(rows)
        factors = self._factors / self._total
        shown = {"target": factors + self.kept(step), "density": factors + int(rows) / self._total}
        if self._flips is not None:  # known from the second selection on, also after a resume
            flips = self._flips.clone()
            if self._reduce:
                self._reduce(flips)
            shown["flips"] = int(flips)
        return shown

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Write Gamma of every site's rows, for ``analyze neurons``."""
        from safetensors.torch import save_file

        names = [s.name for s in find_sites(net) if isinstance(net.get_submodule(s.name), LowRankSparseLinear)]
        rows = {f"{name}/sensitivity": score.clone() for name, score in zip(names, self.scores, strict=True)}
        if rows:
            save_file(rows, folder / "importance.safetensors")


def _rank(share: float, out_features: int, in_features: int) -> int:
    """ceil(share * out * in / (out + in)), the authors' rule."""
    return ceil(share * break_even_rank(out_features, in_features) - 1e-9)


def _balanced(name: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return P sqrt(Sigma), sqrt(Sigma) Q^T of the largest singular values (Eqs. 6-7)."""
    return decompose(weight, rank, sigma_side="balanced", name=name)
