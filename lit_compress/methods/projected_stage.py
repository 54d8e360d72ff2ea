"""SP3's training: projections from calibration, gates on their directions, the Lagrangian, distillation.

Equations and deviations are in methods/sp3.py; the shared part of gates and multipliers in methods/gated_stage.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_compress.calibration import COMPONENTS, bases_of, collect_grams, shared_bases
from lit_compress.errors import UserError, nearest
from lit_compress.gates import keep_best, kept_units
from lit_compress.layers import HardConcrete
from lit_compress.layers.projected import HeadProjections, Norm
from lit_compress.losses import lagrangian, matched_layers_loss
from lit_compress.methods.gated_stage import GatedStage, GatedTraining, average_gradients
from lit_compress.methods.stage import Host
from lit_compress.progress import track
from lit_compress.projected import (
    DIMENSIONS,
    GATES,
    Bases,
    Form,
    GateName,
    Places,
    gate_shapes,
    gated_size,
    identity_bases,
    insert_projections,
)
from lit_compress.schedules import linear_to
from lit_compress.streams import STREAMS, Layout
from lit_compress.surgery import Structure, rebuild

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ProjectedPruning(GatedTraining):
    """How projections are made and gates are learned. All times are fractions of the steps.

    Args:
        start: when the gates of dimensions begin; before, only the teacher is listened to.
        target_warmup: how long the target moves, from ``start`` on.
        structure_start: when the gates of heads and layers begin.
        gates: which there are; hidden, qk, vo, ffn are dimensions, head, mha, ffn_layer whole parts.
        log_alpha: of every gate at first. 10 is open, but some hundred steps of 0.1 away from values where gates
            differ; where there are only a few hundred, 5.
        projections: ``pca`` from calibration, or ``identity`` (the paper's Table 3 without PCA).
        examples: training examples of the calibration.
        tokens: of theirs, how many are used.
        calibration_seed: which examples and tokens.
        ridge: share of the mean eigenvalue added to a head's second moments.
        group: blocks (attentions and feed-forward networks) that share a basis, where norms stand before them.
        norm: ``rms`` is exact; ``padded_layernorm`` the authors' program.
        skip_sites: bases of hidden states from the first that are the identity, without a gate.
        head_projections: ``dense`` trains one matrix for all heads, as the authors' program; ``block`` one per head.
        train_originals: also train the weights between the projections, and the embeddings.
        match_last: also compare the last hidden state with the teacher's.
        tolerance: without exact_target, density that the expected one may be above the target.
    """

    epochs: int = 20
    warmup: float = 0.0
    gate_learning_rate: float = 0.1
    multiplier_learning_rate: float = 0.1
    start: float = 0.1
    target_warmup: float = 0.1
    structure_start: float = 0.4
    gates: tuple[GateName, ...] = GATES
    log_alpha: float = 10.0
    projections: Literal["pca", "identity"] = "pca"
    examples: int = 512
    tokens: int = 4096
    calibration_seed: int = 42
    ridge: float = 1e-6
    group: int = 1
    norm: Norm = "rms"
    skip_sites: int = 0
    head_projections: HeadProjections = "dense"
    train_originals: bool = False
    match_last: bool = True
    tolerance: float = 0.005

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.gates:
            if name not in GATES:
                raise UserError(f"prune.gates: there is no '{name}'; {nearest(name, GATES)}")
        if not self.gates or len(set(self.gates)) < len(self.gates):
            raise UserError(f"prune.gates: {list(self.gates)} must name at least one gate, each once")
        for name in ("start", "structure_start"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(f"prune.{name}: {value} is not in [0, 1); nearest valid {0.0 if value < 0 else 0.9}")
        if self.start + self.target_warmup >= 1:
            raise UserError(
                f"prune.start + prune.target_warmup: {self.start} + {self.target_warmup} leave no step at the target; "
                "the sum must be below 1"
            )
        for name in ("examples", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"prune.{name}: {getattr(self, name)} is below 1, the smallest valid value")
        if not abs(self.log_alpha) <= 12:  # beyond, neither loss nor size has a gradient
            raise UserError(f"prune.log_alpha: {self.log_alpha} is not in [-12, 12]; usual: 10")
        if self.ridge <= 0:
            raise UserError(f"prune.ridge: {self.ridge} is not above 0; usual: 1e-6")


class ProjectedStage(GatedStage):
    """Insert projections, train them with gates, finalize to the exact budget.

    Args:
        settings: how.
        density: final fraction of the dense net's matrices, in (0, 1]; at 1 nothing is put in.
        params: the same as a number of weights, instead.
    """

    settings: ProjectedPruning
    shares: Tensor
    axes: Tensor

    def __init__(self, settings: ProjectedPruning, density: float, params: int | None = None) -> None:
        super().__init__("prune", settings, density)
        self.params, self.tolerance = params, settings.tolerance
        self.form = Form(settings.gates, settings.skip_sites, settings.group, settings.norm, settings.head_projections)
        # a gate whose groups share no matrix, so that the last units of the budget can be given one after another
        self.finest = next((name for name in ("ffn", "qk", "vo") if name in settings.gates), None)
        self.map: nn.Parameter | None = None

    # ---------------------------------------------------------------- set-up

    def check(self, net: PreTrainedModel) -> None:
        """Refuse a family without sites, too few tokens, a density that the gates cannot reach."""
        self.form.layout(net)
        settings, d = self.settings, net.config.hidden_size
        if settings.projections == "pca" and settings.tokens < d:
            raise UserError(
                f"prune.tokens: {settings.tokens} tokens are fewer than the {d} dimensions; give at least {d}"
            )
        self._set_density(net)

    def _set_density(self, net: PreTrainedModel) -> None:
        size = gated_size(net, self.form)
        if self.params is not None:
            self.density = self.params / size.total
        least = {name: torch.full((groups,), int(name in DIMENSIONS)) for name, (groups, _) in size.shapes.items()}
        smallest = size.count(least)
        if not smallest <= self.density * size.total or self.density > 1:
            asked = f"model.density: {self.density:.4g}" if self.params is None else f"model.params: {self.params:,}"
            raise UserError(
                f"{asked} cannot be reached with the gates {', '.join(self.settings.gates)}; reachable: "
                f"{smallest / size.total:.4f} to 1, {smallest:,} to {size.total:,} parameters"
            )

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Calibrate the dense net and put the projections in (Eqs. 6-12); at density 1 leave it as it is."""
        net, settings = super().build(method, previous, structure), self.settings
        self._set_density(net)
        if self.density >= 1:
            return net
        parts, d = self.form.layout(net), net.config.hidden_size
        shares = torch.zeros(len(parts.turnable), d)
        listens = parts.before and "hidden" in settings.gates and method.distillation.alpha_layers > 0
        axes = torch.eye(d).repeat(len(parts.sites) if listens else 0, 1, 1)
        if structure is not None:
            rebuild(net, structure)
        else:
            bases = self._bases(method, net, shares)
            for i in range(settings.skip_sites, len(axes)):
                axes[i] = bases.sites[i]
            insert_projections(net, bases, self.form)
        if not settings.train_originals:
            _freeze(net, parts)
        shapes = gate_shapes(net, self.form)
        heads = net.config.num_attention_heads
        gates = {
            name: HardConcrete(
                *shape, settings.log_alpha, int(name in DIMENSIONS), i, heads if name in ("qk", "vo") else 1
            )
            for i, (name, shape) in enumerate(shapes.items())
        }
        self.make_gates(gates, gated_size(net, self.form))
        self.map = nn.Parameter(torch.eye(d))
        self.register_buffer("shares", shares)
        self.register_buffer("axes", axes)
        return net

    def _bases(self, method: Host, net: PreTrainedModel, shares: Tensor) -> Bases:
        """Return the projections, and fill in what every direction of every site has of its energy."""
        settings = self.settings
        if settings.projections == "identity":
            return identity_bases(net, settings.group)
        trainer = method.trainer
        data, shared = trainer.datamodule, trainer.world_size > 1
        batches = data.calibration_dataloader(min(settings.examples, data.train_size()), settings.calibration_seed)
        net.to(trainer.strategy.root_device)
        grams = collect_grams(
            net, batches, settings.tokens, settings.calibration_seed, settings.group,
            lambda batch: method.kind.inputs(net, batch), method.kind.masks,
            reduce=torch.distributed.all_reduce if shared else None,
            show=lambda found: track(found, "calibrate", len(found)),
        )  # fmt: skip

        def make() -> Bases:
            centred = settings.norm == "rms" and not STREAMS[net.config.model_type].rms
            bases, found = bases_of(grams, settings.ridge, centred)
            shares.copy_(found)
            return bases

        bases = shared_bases(net, make, settings.group) if shared else make()
        net.to("cpu")
        return bases

    def attach(self, net: PreTrainedModel) -> None:
        """Find where the gates' values go."""
        super().attach(net)
        if self.gates:
            self._places = Places(net, self.form)
            self._rms = STREAMS[net.config.model_type].rms
            firsts = {block.host: block for block in reversed(self.form.layout(net).blocks)}.values()
            self._entries = [(block.reads, net.get_submodule(block.norm)) for block in reversed(firsts)]

    def place(self, net: PreTrainedModel, z: dict[str, Tensor], settled: bool = False) -> None:
        """Put the gates' values into the layers."""
        self._places.put(z)

    def own_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """One schedule and one norm of the gradients for everything, as in the authors' program.

        Where the net is sharded, gates and multipliers are not clipped: their gradients are not in the same form.
        """
        groups = super().own_groups(net)
        for group in groups:
            group |= {"constant": False, "clip": self._group is None}
        if self.map is not None:
            groups.append({"params": [self.map], "weight_decay": 0.0, "clip": self._group is None})
        return groups

    # --------------------------------------------------------------- schedule

    def begin(self, total_steps: int) -> None:
        """Turn the fractions into steps."""
        super().begin(total_steps)
        settings = self.settings
        self._start, self._structure = (round(f * total_steps) for f in (settings.start, settings.structure_start))
        self._ramp = self._warmup
        self._warmup = self._start + self._ramp  # first step at the final target

    def target(self, step: int) -> float:
        """Return t(step): that of the dense net with projections until ``start``, then linear."""
        return linear_to(step, self._start, self._ramp, self.initial, self.density)

    def active(self, step: int) -> set[str]:
        """Return the gates that are learned in the step after ``step`` completed ones."""
        dimensions, structure = step >= self._start, step >= max(self._start, self._structure)
        return {name for name in self.gates if (dimensions if name in DIMENSIONS else structure)}

    # ------------------------------------------------------------------- loss

    def losses(self, method: Host, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Draw the active gates, listen to the teacher, add the price of the size (Eq. 5)."""
        if not self.gates:
            return super().losses(method, batch)
        step = method.trainer.global_step
        self._active = self.active(step)
        self.place(
            self._net[0],
            {n: gate.draw() if n in self._active else self._open(gate) for n, gate in self.gates.items()},
        )
        terms = method.objective(method.logits(batch), batch, distil=self.distil)
        parameters = [*self.log_alphas.values(), self.linear, self.quadratic, self.map]
        size = torch.stack([0 * p.sum() for p in parameters]).sum()  # DDP wants a gradient, before_step() does not
        if self._active:
            log_alphas = {n: a if n in self._active else a.detach() for n, a in self.log_alphas.items()}
            size = size + lagrangian(self.size.density(log_alphas), self.target(step), self.linear, self.quadratic)
        return terms | {"size": size}

    @staticmethod
    def _open(gate: HardConcrete) -> Tensor:
        groups, units = gate.log_alpha.shape
        return gate.log_alpha.new_ones(groups, units * gate.copies)

    def layer_loss(self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the distance of the mapped hidden states from the nearest of the teacher's that are not below.

        Those of a turned stream are turned back; the mean that its norms take away does not count, nor do the last
        states, which are behind a norm.
        """
        if self.map is None:
            return super().layer_loss(student, teacher, mask)
        states = student if self.settings.match_last else student[:-1]
        if len(self.axes):
            states = [
                (norm.z * state).to(state.dtype) @ self.axes[site].mT.to(state.dtype)
                for (site, norm), state in zip(self._entries, student[:-1], strict=True)
            ]
            teacher = [h if self._rms else h - h.mean(-1, keepdim=True) for h in teacher[:-1]]
        mapped = [state @ self.map.T.to(state.dtype) for state in states]
        return matched_layers_loss(mapped, teacher, mask)

    def before_step(self, net: PreTrainedModel) -> None:
        """Take away the gradients of what is not learned yet: AdamW must not count those steps."""
        if not self.gates:
            return
        super().before_step(net)
        assert self.map is not None
        average_gradients([self.map], self._group)
        for name, gate in self.gates.items():
            if name not in self._active:
                gate.log_alpha.grad = None
        if not self._active:
            self.linear.grad = self.quadratic.grad = None

    # --------------------------------------------------------------- finalize

    def kept(self, step: int) -> dict[str, Tensor]:
        """Return what stays after ``step``: whole parts as they are expected, then dimensions up to the budget."""
        log_alphas = {name: value.detach().cpu() for name, value in self.log_alphas.items()}
        active = self.active(max(step - 1, 0))
        masks = {
            name: keep_best(a, kept_units(a, self.gates[name].least)) if name in active else torch.ones_like(a).bool()
            for name, a in log_alphas.items()
        }
        if not (self.settings.exact_target and self.at_budget(step)):
            return masks
        if any(name in DIMENSIONS for name in log_alphas):  # then no offset moves whole parts
            log_alphas = {n: a if n in DIMENSIONS else masks[n] * 2e3 - 1e3 for n, a in log_alphas.items()}
        return self.fit(log_alphas)

    def settle(self, net: PreTrainedModel, step: int) -> dict[str, Tensor]:
        """Put the values that are not drawn into ``net``; gates that were never learned are open."""
        masks, active = self.kept(step), self.active(max(step - 1, 0))
        z = {n: gate.settle(masks[n]) if n in active else self._open(gate) for n, gate in self.gates.items()}
        self.place(net, z, settled=True)
        if self.settings.exact_target and step == self.total_steps:
            expected = float(self.size.density(self.log_alphas).detach())
            if expected - self.density > 0.01:
                rank_zero_warn(
                    f"prune: the gates expect a density of {expected:.4f}, {self.density:.4f} is kept; train longer, "
                    "e.g. prune.epochs, or raise prune.multiplier_learning_rate"
                )
        return z

    def at_budget(self, step: int) -> bool:
        """Say whether what is evaluated after ``step`` has the final density."""
        if not self.gates:
            return True
        if step < max(self._warmup, self._start + 1):
            return False
        with torch.no_grad():
            gap = float(self.size.density(self.log_alphas)) - self.density
        return self.settings.exact_target or gap <= self.tolerance

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Write the shares of the principal components, for the picture of them (Figure 1)."""
        if self.gates and self.shares.any():
            save_file({"shares": self.shares.contiguous()}, folder / COMPONENTS)


def _freeze(net: PreTrainedModel, parts: Layout) -> None:
    """Train only projections, norms and the head; where the matrices hold the projections, those."""
    for block in () if parts.before else parts.blocks:
        for name in block.linears.values():
            layer = net.get_submodule(name)
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    parameter.requires_grad_(False)
    for name in (name for place in parts.sites for name in place.tables):
        net.get_submodule(name).requires_grad_(False)
