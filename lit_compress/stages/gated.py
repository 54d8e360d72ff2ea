"""Training with hard-concrete gates and a Lagrangian on the model's expected size, for CoFi, SP3 and FLOP.

    L = L_task + lambda1 (s - t) + lambda2 (s - t)^2,   min over weights and log_alpha, max over lambda1, lambda2

s is the expected density (numerics/hard_concrete.py), t the target, which moves linearly from the
density at the start to the final one.
There is one AdamW: gates and multipliers are groups of their own, the multipliers' with ``maximize``. The gates belong
to the stage, not to the model, so they are never sharded. Every rank samples the same values of them: a step on several
processes is the step that one process makes with all of their examples.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_compress.layers.training.gated import HardConcrete
from lit_compress.models.sites import Model
from lit_compress.numerics.foreach import on_cpu
from lit_compress.numerics.hard_concrete import Size, fit_budget, keep_best, kept_units
from lit_compress.numerics.losses import lagrangian
from lit_compress.numerics.masks import keep_count
from lit_compress.numerics.schedules import linear_to
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.utils.errors import UserError, require


@dataclass(frozen=True)
class GatedTraining(Training):
    """How the gates are trained.

    Args:
        gate_learning_rate: learning rate of the gates' log_alpha. 0.01 suits some ten thousand steps; for a few hundred
            take about 0.1, for one hundred 0.3.
        multiplier_learning_rate: learning rate of the Lagrange multipliers; for a few hundred steps about 0.05.
        target_warmup: fraction of the steps in which the target moves to the final density.
    """

    gate_learning_rate: float = 1e-2
    multiplier_learning_rate: float = 1e-2
    target_warmup: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "prune.epochs", low=1)
        for name in ("gate_learning_rate", "multiplier_learning_rate"):
            require(self, f"prune.{name}", above=0, hint="usual: 1e-2")
        require(self, "prune.target_warmup", low=0, below=1)
        if self.lr_scheduler is not None:
            raise UserError("prune.lr_scheduler: it would change the learning rate of gates; null is valid")
        if self.optimizer is not None and "maximize" not in self.tried().defaults:
            raise UserError(
                "prune.optimizer: its class has no `maximize`, which the multipliers need; nearest: torch.optim.AdamW"
            )


class GatedStage(Stage):
    """Train weights and gates together, down to ``density`` of the counted weights.

    A subclass calls :meth:`make_gates` in ``begin`` and implements :meth:`set_gates`.
    """

    settings: GatedTraining
    density: float
    gates: dict[str, HardConcrete]
    decided_by_data = True
    clamp: tuple[float, float] | None = None  # bounds of log_alpha, applied after every optimizer step
    finest: str  # the gate whose units have the fewest weights; they fill up the budget
    fine: Sequence[str] = ()  # gates that alone meet the budget, if there are some: units of others stay as expected
    rounds: frozenset[str] = frozenset({"neurons", "hidden", "qk", "vo"})  # gates whose units are kept in multiples
    round_to: int

    def __init__(self, settings: GatedTraining, density: float, round_to: int | None = None) -> None:
        super().__init__("prune", settings)
        self.density, self.round_to = density, round_to or 1

    def make_gates(
        self, size: Size, mean: float, kept: Collection[str] = (), *, means: Mapping[str, float] = {},
        copies: Mapping[str, int] = {},
    ) -> None:  # fmt: skip
        """Make the gates of ``size``, the function of their sizes, and the multipliers.

        Arguments by name of a gate are those of HardConcrete: ``mean`` is of gates not in ``means``, and each group of
        those in ``kept`` keeps a unit.
        """
        self.size = size
        self.gates = {
            name: HardConcrete(*shape, means.get(name, mean), int(name in kept), seed, copies.get(name, 1))
            for seed, (name, shape) in enumerate(size.shapes.items())
        }
        self._size = (copy.deepcopy(size),)  # a tuple keeps it on the CPU
        self.held = nn.ModuleDict(self.gates)
        self.linear = nn.Parameter(torch.zeros(1))
        self.quadratic = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            self.initial = float(size.density(self.log_alphas))

    def set_gates(self, net: Model, z: dict[str, Tensor], deterministic: bool = False) -> None:
        """Give ``net`` the gates' values z, by name, [groups, size] each, for its next forwards.

        ``deterministic`` means the exported model's values, not samples.
        """
        raise NotImplementedError

    @property
    def log_alphas(self) -> dict[str, nn.Parameter]:
        """log_alpha by the name of its gate."""
        return {name: gate.log_alpha for name, gate in self.gates.items()}

    def attach(self, net: Model) -> None:
        """Keep the model, whose gates :meth:`losses` sets."""
        super().attach(net)
        self._net = (net,)  # a tuple hides it from the state dict

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Return the groups of gates and multipliers: constant rates, no clipping; multipliers are maximised."""
        same = {"weight_decay": 0.0, "constant": True, "clip": False}
        gates = {"params": list(self.log_alphas.values()), "lr": self.settings.gate_learning_rate}
        multipliers = {"params": [self.linear, self.quadratic], "lr": self.settings.multiplier_learning_rate}
        return [*super().param_groups(net), gates | same, multipliers | same | {"maximize": True}]

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fraction of the target's warm-up into steps."""
        super().set_total_steps(total_steps)
        self._warmup = round(self.settings.target_warmup * total_steps)

    def target(self, step: int) -> float:
        """Return the target t(step) of the expected density."""
        return linear_to(step, 0, self._warmup, self.initial, self.density)

    def active(self, step: int) -> set[str]:
        """Return the gates that are trained in the optimizer step after ``step`` completed ones; others are open."""
        return set(self.gates)

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sample the trained gates; return the usual loss terms and the Lagrangian of the size."""
        step = method.trainer.global_step
        active = self.active(step)
        other = method.own_seed != method.step_seed  # gates are drawn alike on every rank and for every micro-batch
        if other:
            torch.manual_seed(method.step_seed)
        z = {n: gate.sample() if n in active else opened(gate) for n, gate in self.gates.items()}
        if other:
            torch.manual_seed(method.own_seed)
        self.set_gates(self._net[0], z)
        terms = super().losses(method, batch)
        log_alphas = {n: a if n in active else a.detach() for n, a in self.log_alphas.items()}
        density = self.size.density(log_alphas)
        return terms | {"size": lagrangian(density, self.target(step), self.linear, self.quadratic)}

    @torch.no_grad()
    def after_step(self, net: Model, step: int) -> None:
        """Clamp log_alpha to its bounds."""
        for log_alpha in self.log_alphas.values() if self.clamp is not None else ():
            log_alpha.clamp_(*self.clamp)  # type: ignore[misc]

    def kept_masks(self, step: int) -> dict[str, Tensor]:
        """Return the units that deterministic gates keep after ``step``: name -> bool [groups, size], on the CPU."""
        values = on_cpu([value.detach() for value in self.log_alphas.values()])
        log_alphas, active = dict(zip(self.gates, values, strict=True)), self.active(max(step - 1, 0))
        fixed = [name for name in log_alphas if name not in self.fine] if self.fine else []
        masks = {
            name: keep_best(a, kept_units(a, self.gates[name].least)) if name in active else torch.ones_like(a).bool()
            for name, a in log_alphas.items()
            if not self.arrived(step) or name in fixed
        }
        if not self.arrived(step):
            return masks
        return self.fit(log_alphas | {n: torch.where(masks[n], torch.inf, -torch.inf) for n in fixed})

    def fit(self, log_alphas: dict[str, Tensor], budget: int | None = None) -> dict[str, Tensor]:
        """Return the units to keep, bool [groups, size] by gate, so that the budget is met exactly.

        ``log_alphas`` are on the CPU; ``budget`` is a number of weights, None for the final density's.
        """
        budget = keep_count(self.density, self.size.total) if budget is None else budget
        least = {name: gate.least for name, gate in self.gates.items()}
        steps = dict.fromkeys(self.rounds, self.round_to)
        return fit_budget(log_alphas, self._size[0], budget, least, self.finest, steps)

    def deterministic(self, net: Model, step: int) -> dict[str, Tensor]:
        """Give ``net`` the gates' deterministic values and return them by name.

        Warns after the last step if the kept density differs from the one that the gates expect, used in training.
        """
        masks, active = self.kept_masks(step), self.active(max(step - 1, 0))
        z = {n: gate.deterministic(masks[n]) if n in active else opened(gate) for n, gate in self.gates.items()}
        self.set_gates(net, z, deterministic=True)
        expected = float(self.size.density(self.log_alphas).detach()) if step == self.total_steps else self.density
        if not 0.85 * self.density <= expected <= self.density + 0.01:
            # too few are open where gates moved more slowly than their target, and the price rose meanwhile
            rate = "multiplier" if expected > self.density else "gate"
            rank_zero_warn(
                f"{self.name}: the gates expect a density of {expected:.4f}, {self.density:.4f} is kept; train longer, "
                f"e.g. {self.name}.epochs, or raise {self.name}.{rate}_learning_rate"
            )
        return z

    def before_validation(self, net: Model, step: int) -> None:
        """Fix the gates, so that the model that would be exported now is evaluated."""
        self.deterministic(net, step)

    @torch.no_grad()
    def status(self, net: Model, step: int) -> dict[str, float]:
        """Log target, expected density, density of the units kept now, and the multipliers."""
        counts = {name: kept_units(gate.log_alpha, gate.least) for name, gate in self.gates.items()}
        return {
            "target": self.target(step),
            "density": float(self.size.density(self.log_alphas)),
            "actual": self.size.count(counts) / self.size.total,
            "lambda1": float(self.linear),
            "lambda2": float(self.quadratic),
        }

    def arrived(self, step: int) -> bool:
        """Return whether the gates' target has reached its final value."""
        return step >= self._warmup

    def at_budget(self, step: int) -> bool:
        """Return whether the model that is evaluated after ``step`` has the final density."""
        return step >= 1 and self.arrived(step)


def opened(gate: HardConcrete) -> Tensor:
    """Return the values of a gate whose units are all open."""
    return gate.log_alpha.new_ones(len(gate.log_alpha), gate.log_alpha.shape[1] * gate.copies)
