"""Training with hard-concrete gates whose expected size a Lagrangian drives to the target: what CoFi and SP3 share.

    L = L_task + lambda1 (s - t) + lambda2 (s - t)^2,   min over weights and log_alpha, max over lambda1, lambda2

s is the expected density (gates.py), t the target, which moves linearly from the density at the start to the final one.
One AdamW: gates and multipliers are groups of their own, the multipliers' with ``maximize``. The gates belong to the
stage, not to the net, so they are whole on every rank also where the net is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.gates import Size, fit_budget, keep_best, kept_units
from lit_compress.layers import HardConcrete
from lit_compress.losses import lagrangian
from lit_compress.masks import keep_count
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.schedules import linear_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GatedTraining(Training):
    """How the gates learn.

    Args:
        gate_learning_rate: of log_alpha; constant. 0.01 is for some ten thousand steps; a few hundred want about 0.1.
        multiplier_learning_rate: of the multipliers; constant. Likewise, about 0.05.
        target_warmup: fraction of the steps in which the target moves to the final density.
        exact_target: keep exactly as many units as the density allows, the best by one threshold, instead of as many as
            the gates expect; the last bit of the budget goes to neurons.
    """

    gate_learning_rate: float = 1e-2
    multiplier_learning_rate: float = 1e-2
    target_warmup: float = 0.2
    exact_target: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gate_learning_rate", "multiplier_learning_rate"):
            if getattr(self, name) <= 0:
                raise UserError(f"prune.{name}: {getattr(self, name)} is not above 0; usual: 1e-2")
        if not 0 <= self.target_warmup < 1:
            raise UserError(
                f"prune.target_warmup: {self.target_warmup} is not in [0, 1); nearest valid "
                f"{0.0 if self.target_warmup < 0 else 0.9}"
            )


class GatedStage(Stage):
    """Train weights and gates together. A subclass makes the gates in ``build`` and puts their values into the net.

    ``build`` calls :meth:`make_gates`; without gates (density 1) the stage is plain training.

    Args:
        name: of the stage.
        settings: how the gates learn.
        density: final fraction of the counted weights.
    """

    clamp: tuple[float, float] | None = None  # of log_alpha, after every optimizer step
    finest: str | None = None  # gate of the cheapest units
    tolerance = 0.01  # without exact_target: how near the expected density must come to count as arrived

    def __init__(self, name: str, settings: GatedTraining, density: float) -> None:
        super().__init__(name, settings)
        self.settings, self.density = settings, density
        self.gates: dict[str, HardConcrete] = {}

    def make_gates(self, gates: dict[str, HardConcrete], size: Size) -> None:
        """Take the gates, by name, and what they leave of the net."""
        self.gates, self.size = gates, size
        self.held = nn.ModuleDict(gates)
        self.linear = nn.Parameter(torch.zeros(1))
        self.quadratic = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            self.initial = float(size.density(self.log_alphas))

    def place(self, net: PreTrainedModel, z: dict[str, Tensor], settled: bool = False) -> None:
        """Put the gates' values, by name, [groups, size] each, where the next forwards of ``net`` read them.

        ``settled`` says that they are not drawn but what would be cut.
        """
        raise NotImplementedError

    @property
    def log_alphas(self) -> dict[str, Tensor]:
        """log_alpha by the name of its gate."""
        return {name: gate.log_alpha for name, gate in self.gates.items()}

    def attach(self, net: PreTrainedModel) -> None:
        """Note the ranks over which gradients of gates are averaged: under FSDP2 nobody else does."""
        super().attach(net)
        mesh = getattr(next(net.parameters()), "device_mesh", None)
        self._group = None if mesh is None else mesh.get_group()
        self._net = (net,)  # a tuple hides it from the state dict

    def own_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """Give gates and multipliers their constant learning rates; neither is clipped, the multipliers ascend."""
        groups = super().own_groups(net)
        if not self.gates:
            return groups
        same = {"weight_decay": 0.0, "constant": True, "clip": False}
        gates = {"params": list(self.log_alphas.values()), "lr": self.settings.gate_learning_rate}
        multipliers = {"params": [self.linear, self.quadratic], "lr": self.settings.multiplier_learning_rate}
        return [*groups, gates | same, multipliers | same | {"maximize": True}]

    def begin(self, total_steps: int) -> None:
        """Turn the fraction into steps."""
        super().begin(total_steps)
        self._warmup = round(self.settings.target_warmup * total_steps)

    def target(self, step: int) -> float:
        """Return t(step), the density the expected one is held to."""
        return linear_to(step, 0, self._warmup, self.initial, self.density)

    def losses(self, method: Host, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Draw the gates, add the price of the size."""
        if not self.gates:
            return super().losses(method, batch)
        self.place(self._net[0], {name: gate.draw() for name, gate in self.gates.items()})
        terms = super().losses(method, batch)
        target = self.target(method.trainer.global_step)
        return terms | {"size": lagrangian(self.size.density(self.log_alphas), target, self.linear, self.quadratic)}

    def before_step(self, net: PreTrainedModel) -> None:
        """Average what the ranks' draws say of the gates, where no strategy does it."""
        super().before_step(net)
        if self.gates:
            average_gradients((*self.log_alphas.values(), self.linear, self.quadratic), self._group)

    def after_step(self, net: PreTrainedModel, step: int) -> None:
        """Keep log_alpha within its bounds."""
        if self.clamp is not None:
            for gate in self.gates.values():
                gate.clamp_(*self.clamp)

    def kept(self, step: int) -> dict[str, Tensor]:
        """Return what stays after ``step`` when nothing is drawn: name of a gate -> bool [groups, size], on the CPU."""
        log_alphas = {name: value.detach().cpu() for name, value in self.log_alphas.items()}
        if self.settings.exact_target and step >= self._warmup:
            return self.fit(log_alphas)
        return {name: keep_best(a, kept_units(a, self.gates[name].least)) for name, a in log_alphas.items()}

    def fit(self, log_alphas: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the units, bool [groups, size] by name, that meet the budget exactly."""
        least, size = {name: gate.least for name, gate in self.gates.items()}, self.size.cpu()
        finest = self.finest if self.finest in log_alphas else None
        masks = fit_budget(log_alphas, size, keep_count(self.density, size.total), least, finest)
        self.size.to(next(iter(self.log_alphas.values())).device)
        return masks

    def settle(self, net: PreTrainedModel, step: int) -> dict[str, Tensor]:
        """Put the values that are not drawn into ``net`` and return them, by name of the gate."""
        masks = self.kept(step)
        z = {name: gate.settle(masks[name]) for name, gate in self.gates.items()}
        self.place(net, z, settled=True)
        return z

    def before_validation(self, net: PreTrainedModel, step: int) -> None:
        """Evaluate what would be exported now."""
        if self.gates:
            self.settle(net, step)

    @torch.no_grad()
    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Show target, expected density and that of the units kept now, and the multipliers."""
        if not self.gates:
            return {"target": 1.0, "density": 1.0}
        counts = {name: kept_units(gate.log_alpha, gate.least) for name, gate in self.gates.items()}
        return {
            "target": self.target(step),
            "density": float(self.size.density(self.log_alphas)),
            "actual": self.size.count(counts) / self.size.total,
            "lambda1": float(self.linear),
            "lambda2": float(self.quadratic),
        }

    def at_budget(self, step: int) -> bool:
        """Say whether what is evaluated after ``step`` has the final density."""
        if not self.gates:
            return True
        if step < self._warmup:
            return False
        with torch.no_grad():
            gap = float(self.size.density(self.log_alphas)) - self.density
        return self.settings.exact_target or abs(gap) <= self.tolerance


def average_gradients(parameters: Iterable[nn.Parameter], group: Any) -> None:
    """Average gradients over the ranks of ``group``, in place; None where a strategy has done it or there is one rank.

    Under FSDP2 it is for parameters that are whole on every rank.
    """
    if group is None:
        return
    for parameter in parameters:
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
