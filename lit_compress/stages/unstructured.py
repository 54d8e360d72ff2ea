"""Unstructured pruning on the cubic schedule: LPAF's step 1; magnitude, first-order and PLATON pruning.

Ren & Zhu 2023, "Low-Rank Prune-And-Factorize for Language Model Compression", section 2.2:

    Eq. 4   S_ij = sum_t |g_ij(t) W_ij(t)|      (its LaTeX source; the published text has - sum_t g_ij(t) W_ij(t))
    Eq. 5   kept fraction v(t): 1 until t_i, then cubic down to v_f at T - t_f, v_f from there
    text    "we discard M and directly set W_ij to zero if S_ij(t) is not in the top-v_t at time step t"

Deviations: the threshold is computed again every ``interval`` steps and at the last one ("at certain iterations we
need to rank all model parameters", Limitations), and applied after every step, because AdamW moves a
zeroed weight again. A zeroed weight has g W = 0, so its first-order score is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_compress.models.sites import Model, find_sites
from lit_compress.numerics.importance import accumulate_first_order_, row_importance
from lit_compress.numerics.masks import apply_threshold_, break_ties_, keep_count, kth_largest
from lit_compress.numerics.schedules import cubic
from lit_compress.stages.base import Limits, Stage, Training, require_steps
from lit_compress.utils.errors import UserError, require
from lit_compress.utils.sharding import Shards, local


class Score(nn.Module):
    """The base class of scores, which computes none. Weights with larger scores are kept.

    The score tensors, float32, shaped and sharded like the weights, belong to the stage. A score object writes them,
    and keeps averages as buffers of its own. Its hooks are called in the order of an optimizer step.
    """

    def attach(self, weights: Sequence[Tensor]) -> None:
        """Make buffers shaped like ``weights``."""

    def check(self, start: int) -> None:
        """Refuse by a UserError a first ranking after ``start`` optimizer steps that comes before the first scores."""

    def before_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Read the weights before the step and their gradients: finite, accumulated, reduced, not clipped."""

    def after_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor], step: int) -> None:
        """Read the weights after optimizer step ``step``, before any is zeroed, and their clipped gradients."""

    def before_ranking(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Update the scores before weights are ranked; in this step no weight has been zeroed yet."""


class FirstOrderScore(Score):
    """The sum of |g W| over the optimizer steps (UP_first, LPAF Eq. 4)."""

    def before_step(self, scores: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Add this step's term."""
        accumulate_first_order_(scores, weights, [weight.grad for weight in weights])


@dataclass(frozen=True)
class CubicSchedule(Training):
    """The cubic schedule of a density: 1 at first, then a cubic fall, then the final density (Eq. 5).

    Args:
        start: t_i, steps before pruning begins; below 1 a fraction of all optimizer steps, else their number.
        end: t_f, last steps, at the final density; a fraction or a number likewise.
        init: ``finetuned`` starts from the dense model, ``pretrained`` from the backbone.
    """

    start: float = 0.1
    end: float = 0.3
    init: Literal["finetuned", "pretrained"] = "finetuned"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prune.epochs", low=1)
        for name, value in (("start", self.start), ("end", self.end)):
            require_steps(f"prune.{name}", value)
        if self.start < 1 and self.end < 1 and self.start + self.end >= 1:
            raise UserError(
                f"prune.start + prune.end: {self.start} + {self.end} leave no step to prune; the sum must be below 1"
            )


@dataclass(frozen=True)
class Unstructured(CubicSchedule):
    """Schedule and ranking of unstructured pruning.

    Args:
        interval: optimizer steps between two rankings.
    """

    interval: int = 10
    limits: ClassVar[Limits] = {"prune.interval": {"low": 1}}


class CubicStage(Stage):
    """A stage whose density falls on the cubic schedule to ``density``, v_f."""

    settings: CubicSchedule
    density: float

    def __init__(self, settings: CubicSchedule, density: float) -> None:
        super().__init__("prune", settings)
        self.density = density

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fractions of the steps into steps; a UserError if none is left between start and end."""
        super().set_total_steps(total_steps)
        self._start, self._end = (
            round(value * total_steps) if value < 1 else int(value)
            for value in (self.settings.start, self.settings.end)
        )
        self.target(0)

    def target(self, step: int, final: float | None = None) -> float:
        """Return v(step), the kept fraction (Eq. 5), which falls to ``final``, by default to the density."""
        return cubic(step, self.total_steps, self._start, self._end, self.density if final is None else final)

    def at_budget(self, step: int) -> bool:
        """Return whether the schedule has arrived at the final density."""
        return step >= max(1, self.total_steps - self._end)  # weights are zeroed after a step


class UnstructuredPruning(CubicStage):
    """The stage ``prune``: train, score the weights, zero those with a score below ``threshold`` [1], of v(t)."""

    threshold: Tensor
    settings: Unstructured
    repeatable = True

    def __init__(self, settings: Unstructured, density: float, score: Score) -> None:
        super().__init__(settings, density)
        self.score = score
        self.register_buffer("threshold", torch.full((1,), -torch.inf))

    def attach(self, net: Model) -> None:
        """Make one float32 score per weight of the sites, sharded like the weight."""
        self._names = [site.name for site in find_sites(net)]
        self._weights = [net.get_parameter(f"{name}.weight") for name in self._names]
        for i, weight in enumerate(self._weights):
            self.register_buffer(f"score_{i}", torch.zeros_like(weight, dtype=torch.float32, requires_grad=False))
        self.score.attach(self._weights)
        self._shards = Shards(self._weights[0])

    @property
    def scores(self) -> list[Tensor]:
        """Importance per site, [out, in] float32."""
        return [self.get_buffer(f"score_{i}") for i in range(len(self._names))]

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fractions of the steps into steps; a UserError if the first scores come after the start."""
        super().set_total_steps(total_steps)
        self.score.check(self._start)

    def before_step(self, net: Model) -> None:
        """Let the score read the gradients, not clipped."""
        self.score.before_step(self.scores, self._weights)

    def after_step(self, net: Model, step: int) -> None:
        """Zero every weight below the threshold; every ``interval`` steps, compute the threshold again."""
        self.score.after_step(self.scores, self._weights, step)
        if step < self._start:
            return
        arrived = self.total_steps - self._end
        if step % self.settings.interval == 0 or step in (self._start, arrived, self.total_steps):
            self._rank(step)
        apply_threshold_(self._weights, self.scores, self.threshold[0])

    def _rank(self, step: int) -> None:
        """Set the threshold so that the kept fraction is v(step), exactly at the final density."""
        self.score.before_ranking(self.scores, self._weights)
        tolerance = 0.0 if self.at_budget(step) else 0.001
        keep = keep_count(self.target(step), sum(score.numel() for score in self.scores))
        self.threshold[0] = threshold = kth_largest(self.scores, keep, self._shards.reduce)
        break_ties_(self.scores, threshold, keep, tolerance, self._shards.reduce, self._shards.place)

    @torch.no_grad()
    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log target and achieved density."""
        kept = torch.stack([torch.count_nonzero(local(weight)) for weight in self._weights]).sum()
        if self._shards.reduce:
            self._shards.reduce(kept)
        total = sum(weight.numel() for weight in self._weights)
        return {"target": self.target(step), "density": int(kept) / total}

    def finish(self, net: Model, folder: Path) -> None:
        """Write the row importances, by which LPAF factorizes."""
        from safetensors.torch import save_file

        rows = {
            f"{name}/scores": row_importance(score, weight.detach())
            for name, score, weight in zip(self._names, self.scores, self._weights, strict=True)
        }
        save_file(rows, folder / "importance.safetensors")
