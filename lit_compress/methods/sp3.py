"""SP3: structured pruning, by gates, of directions that PCA found.

Yuxuan Hu, Jing Zhang, Zhe Zhao, Chen Zhao, Xiaodong Chen, Cuiping Li, Hong Chen, "SP3: Enhancing Structured Pruning via
PCA Projection", Findings of ACL 2024, https://arxiv.org/abs/2308.16475; program: https://github.com/hyx1999/SP3.

    Eqs. 6-9    LN(x) = P_out norm(P_in x) + beta, P_in = U^T R, P_out = diag(gamma) U  numerics/pca.py
    Eqs. 10-12  P_V, P_O; P_Q, P_K of every head                                      numerics/pca.py
    Eqs. 13-14  z on directions of hidden states, Q/K, V/O, FFN; on heads and layers  layers/training/projected.py
    Eqs. 4, 5   min over weights and z, max over lambda: L + l1 (s - t) + l2 (s - t)^2  stages/gated.py
    Eq. 30      s, the expected density, with W_R                                     models/projected/gates.py
    Eqs. 15-18  everything multiplied into smaller matrices; W_R on the residual path  models/projected/
    section 3.5 pre-norm: every sub-layer has a basis of the residual stream          models/residual_stream.py
    phases      teacher only; then gates of dimensions, target falls; then of heads and layers  :class:`ProjectedStage`

The loss is from the authors' program: 0.3 KL(T = 2) + 0.7 sum_i MSE(A h_i, teacher_m(i)), without labels.

Deviations, and where the paper is silent:
    - Printing errors of the paper: see numerics/pca.py and models/projected/ (norm, V_Z, P_O, superscripts, W_R's
      sum).
    - The norm is exact, a root mean square over the original width; the program's LayerNorm in the projected space is
      not the original model, which is why it leaves out three sites.
    - Gates are hard concrete, as in the program (the paper only says real numbers); Q and K share one, V and O do, and
      all heads of a layer (Appendix C). Open gates keep their soft value, which is folded into the weights.
    - Projections of heads are trained as one matrix, in which heads mix, as in the program; the paper writes one per
      head.
    - Original matrices and embeddings are frozen, as in the program: projections, norms and the head are trained.
    - The density is exact: the gates decide on heads and layers, then one threshold over all dimensions meets the
      budget in every validation; the program accepts any epoch within 0.02.
    - Every model gets all gates that it can have. In pre-norm models no sub-layers share a basis, as they may in the
      paper.
    - Calibration draws 4,096 tokens among all real ones (the paper), not 8 of every example; a ridge replaces the
      program's bare inverse. The density at the start is computed, not 1.16.
    - Regression has the MSE of the logits in place of the program's KL of one logit, which is 0.
    - All hidden states are matched; the program's sum leaves out the last one.
    - OPT, Llama and Qwen3 have no public program. There the bases are in the matrices, which are trained; hidden states
      are compared before the last norm, without their mean where norms take it away. A density counts the blocks'
      matrices and those between bases, not the embeddings.
    - ALBERT is not in the paper. Its blocks read the embeddings first, then their own output: hidden states keep their
      basis, without gates; heads are calibrated over all uses of a block, whose gates and weights are one and count
      once. So it is where embeddings have another width (ELECTRA-small, OPT-350m), or the first attention has no
      norm (ModernBERT).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_compress.calibration.second_moments import bases_of, collect_grams
from lit_compress.methods.base import Method
from lit_compress.models.architectures import get_architecture
from lit_compress.models.projected.gates import (
    DIMENSIONS,
    GateSlots,
    even_units,
    gated_size,
    possible_gates,
)
from lit_compress.models.projected.projections import (
    Bases,
    fold_projections,
    identity_bases,
    insert_projections,
    narrowed,
)
from lit_compress.models.residual_stream import residual_stream
from lit_compress.models.sites import Model
from lit_compress.models.surgery import Structure, rebuild
from lit_compress.numerics.losses import LossKind, States, matched_layers_loss
from lit_compress.numerics.schedules import linear_to
from lit_compress.stages.base import Limits, Stage
from lit_compress.stages.compression import CALIBRATION_SEED
from lit_compress.stages.distillation import MappedDistillation
from lit_compress.stages.gated import GatedStage, GatedTraining
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.utils.devices import move
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import Shards, from_first


@dataclass(frozen=True)
class SP3Distillation(MappedDistillation):
    """The distillation loss of SP3's program (Hu et al. 2024):

        L = alpha_labels L_task + alpha KL + alpha_layers sum_i MSE(A H_student^i, H_teacher^m(i))

    m(i) is the nearest teacher hidden state at or above layer i; A is learned. KL has no factor temperature^2.

    Args:
        alpha: weight of the teacher's logits.
        temperature: temperature of both distributions.
    """

    alpha: float = 0.3
    alpha_layers: float = 0.7
    mask_padding: bool = True

    def logits_weight(self, kind: LossKind) -> float:
        """Return the factor on the logits' term, which takes out the square of the temperature."""
        return self.alpha / (self.temperature**2 if kind == "classification" else 1)


@dataclass(frozen=True)
class ProjectedPruning(GatedTraining):
    """How projections are made and gates are trained. Times are fractions of the stage's steps.

    Args:
        start: when the gates of dimensions begin to be trained; before, only distillation trains the model.
        target_warmup: how long the target density falls, from ``start`` on.
        structure_start: when the gates of heads and layers begin to be trained.
        log_alpha: initial value of every gate's parameter. At 10 gates are open and need some hundred steps at learning
            rate 0.1 until they differ; use 5 where a run has only a few hundred steps.
        examples: number of training examples for calibration.
        tokens: number of tokens of these examples that are used.
    """

    epochs: int = 20
    warmup: float = 0.0
    gate_learning_rate: float = 0.1
    multiplier_learning_rate: float = 0.1
    start: float = 0.1
    target_warmup: float = 0.1
    structure_start: float = 0.4
    log_alpha: float = 10.0
    examples: int = 512
    tokens: int = 4096
    limits: ClassVar[Limits] = {
        **{f"prune.{name}": {"low": 0, "below": 1} for name in ("start", "structure_start")},
        **{f"prune.{name}": {"low": 1} for name in ("examples", "tokens")},
        "prune.log_alpha": {"low": -12, "high": 12, "hint": "usual: 10"},  # beyond, nothing has a gradient
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start + self.target_warmup >= 1:
            raise UserError(
                f"prune.start + prune.target_warmup: {self.start} + {self.target_warmup} leave no step at the target; "
                "the sum must be below 1"
            )


class ProjectedStage(GatedStage):
    """The stage ``prune``: insert projections, train them with gates, meet the budget, fold.

    Args:
        density: final fraction of the sites' weights, in (0, 1]; at 1 nothing is inserted.

    Attributes:
        axes: U [sites, d, d] of a pre-norm model's sites, if hidden states are distilled; else none.
    """

    settings: ProjectedPruning
    axes: Tensor
    map: nn.Parameter
    matches = True
    fine = DIMENSIONS
    finest = "neurons"  # groups of others share matrices, so the last units of the budget cannot be given one by one

    # ---------------------------------------------------------------- set-up

    def check(self, net: Model) -> None:
        """Refuse architectures without gates, too few tokens, and a density that the gates cannot reach."""
        gates, tokens, d = possible_gates(net), self.settings.tokens, net.config.hidden_size
        if tokens < d:
            raise UserError(f"prune.tokens: {tokens} tokens are fewer than the {d} dimensions; give at least {d}")
        size = gated_size(net, gates)
        least = {name: torch.full((groups,), int(name in DIMENSIONS)) for name, (groups, _) in size.shapes.items()}
        smallest = size.count(least)
        if smallest > self.density * size.total:
            raise UserError(
                f"model.density: {self.density:.4g} cannot be reached with the gates {', '.join(gates)}; "
                f"reachable: {smallest / size.total:.4f} to 1, {smallest:,} to {size.total:,} parameters"
            )

    def outline(self, net: Model) -> Model:
        """Return ``net`` with the sizes that an even share of all directions and neurons leaves."""
        gates = possible_gates(net)
        return narrowed(net, gates, even_units(gated_size(net, gates), self.density), identity_bases(net))

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Insert projections, after a calibration of the dense model (Eqs. 6-12) or of a checkpoint; gate them."""
        stream, gates, d = residual_stream(net), possible_gates(net), net.config.hidden_size
        listens = stream.pre_norm and "hidden" in gates and method.distillation.alpha_layers > 0
        self.register_buffer("shares", torch.zeros(len(stream.rotatable), d))  # checkpoints of 0.2 have it
        self.register_buffer("axes", torch.eye(d).repeat(len(stream.sites) if listens else 0, 1, 1))
        if structure is not None:
            rebuild(net, structure)
        else:
            bases = self._bases(method, net)
            for i in range(len(self.axes)):
                self.axes[i] = bases.sites[i]
            insert_projections(net, bases, gates)
        _freeze(net)
        copies = dict.fromkeys(("qk", "vo"), net.config.num_attention_heads)
        self.make_gates(gated_size(net, gates), self.settings.log_alpha, DIMENSIONS, copies=copies)
        self.map = nn.Parameter(torch.eye(d))
        return net

    def _bases(self, method: MicroBatches, net: Model) -> Bases:
        """Return the projections by a calibration of the dense model."""
        settings, trainer = self.settings, method.trainer
        data, shared = trainer.datamodule, trainer.world_size > 1  # type: ignore[attr-defined]
        batches = data.calibration_dataloader(min(settings.examples, data.train_size()), CALIBRATION_SEED)
        move(net, trainer.strategy.root_device)
        grams = collect_grams(
            net, batches, settings.tokens, CALIBRATION_SEED, partial(method.kind.run, logits=False), method.kind.masks,
            reduce=torch.distributed.all_reduce if shared else None,
        )  # fmt: skip
        move(net, "cpu")
        # eigenvectors of equal eigenvalues would differ between machines
        return from_first(lambda: bases_of(grams, centred=not get_architecture(net).rms))

    def attach(self, net: Model) -> None:
        """Find the modules that the gates multiply, and the norms whose inputs are distilled."""
        super().attach(net)
        self._slots = GateSlots(net, possible_gates(net))
        self._rms = get_architecture(net).rms
        sublayers = reversed(residual_stream(net).sublayers)
        firsts = reversed({sublayer.block: sublayer for sublayer in sublayers}.values())
        self._entries: list[tuple[int, Any]] = [(part.reads, net.get_submodule(str(part.norm))) for part in firsts]

    def set_gates(self, net: Model, z: dict[str, Tensor], deterministic: bool = False) -> None:
        """Give the layers the values of the gates."""
        self._slots.set(z)

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Return the groups, with one schedule and one gradient norm for all, as in the authors' program.

        Where the model is sharded, gates and multipliers are not clipped, because they are not sharded.
        """
        groups = [*super().param_groups(net), {"params": [self.map], "weight_decay": 0.0}]
        for group in groups:
            group |= {"constant": False, "clip": Shards(next(net.parameters())).group is None}
        return groups

    # --------------------------------------------------------------- schedule

    def set_total_steps(self, total_steps: int) -> None:
        """Turn the fractions of the steps into steps; a UserError if no gate is trained in them."""
        super().set_total_steps(total_steps)
        settings = self.settings
        self._start, self._structure = (round(f * total_steps) for f in (settings.start, settings.structure_start))
        if self._start >= total_steps > 0:
            raise UserError(
                f"prune.start: {settings.start} leaves none of the {total_steps} steps for the gates; nearest valid "
                f"{(total_steps - 1) / total_steps:.3g}"
            )
        self._ramp = self._warmup
        self._warmup = self._start + self._ramp  # first step at the final target

    def target(self, step: int) -> float:
        """Return the target density t(step): the model's with projections until ``start``, then linear."""
        return linear_to(step, self._start, self._ramp, self.initial, self.density)

    def active(self, step: int) -> set[str]:
        """Return the gates that are trained in the optimizer step after ``step`` completed ones."""
        dimensions, structure = step >= self._start, step >= max(self._start, self._structure)
        return {name for name in self.gates if (dimensions if name in DIMENSIONS else structure)}

    # ------------------------------------------------------------------- loss

    def losses(self, method: MicroBatches, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms of distillation and, once gates are trained, the Lagrangian of the size (Eq. 5)."""
        terms, self._active = super().losses(method, batch), self.active(method.trainer.global_step)
        parameters = (*self.log_alphas.values(), self.linear, self.quadratic, self.map)
        size = torch.stack([0 * p.sum() for p in parameters]).sum()  # DDP needs all gradients
        return terms | {"size": size + terms["size"] if self._active else size}

    def layer_loss(self, student: States, teacher: States, mask: Tensor | None, relative: bool | States) -> Tensor:
        """Return the distance of mapped hidden states from the nearest teacher states at or above their layer.

        In pre-norm models in the original basis, without the mean where norms remove it, and without the last states.
        """
        states = student
        if len(self.axes):
            states = [
                (norm.z * state).to(state.dtype) @ self.axes[site].mT.to(state.dtype)
                for (site, norm), state in zip(self._entries, student[:-1], strict=True)
            ]
            teacher = [h if self._rms else h - h.mean(-1, keepdim=True) for h in teacher[:-1]]
        mapped = [state @ self.map.T.to(state.dtype) for state in states]
        return matched_layers_loss(mapped, teacher, mask, self.over_step)

    def before_step(self, net: Model) -> None:
        """Drop the gradients of gates and multipliers that are not trained yet: AdamW must not count those steps."""
        super().before_step(net)
        for name, gate in self.gates.items():
            if name not in self._active:
                gate.log_alpha.grad = None
        if not self._active:
            self.linear.grad = self.quadratic.grad = None

    # ----------------------------------------------------------- kept units

    def deterministic(self, net: Model, step: int) -> dict[str, Tensor]:
        """Give ``net`` the gates' deterministic values and return them; gates not trained yet are open."""
        z = super().deterministic(net, step)
        if step == self.total_steps:
            kept = self.size.count(self.kept_masks(step)) / self.size.total
            if kept < 0.99 * self.density:
                rank_zero_warn(
                    f"prune: the gates closed so many heads and layers that a density of {kept:.4f} is kept, not "
                    f"{self.density:.4f}; train longer, e.g. prune.epochs, or lower prune.gate_learning_rate"
                )
        return z

    def arrived(self, step: int) -> bool:
        """Return whether the target has reached its final value, and gates have been trained."""
        return step >= max(self._warmup, self._start + 1)

    def deploy(self, net: Model) -> None:
        """Multiply projections and gates into smaller matrices."""
        fold_projections(net)


def _freeze(net: Model) -> None:
    """Freeze the embeddings and, in post-norm models, the original matrices (pre-norm ones hold projections)."""
    stream = residual_stream(net)
    for sublayer in () if stream.pre_norm else stream.sublayers:
        for name in sublayer.sites.values():
            for kind, parameter in net.get_submodule(name).named_parameters():
                parameter.requires_grad_(kind in ("projection", "shift"))
    for name in (name for place in stream.sites for name in place.tables):
        net.get_submodule(name).requires_grad_(False)


class SP3(Method):
    """Prune principal directions of hidden states, queries, keys and values; neurons, heads and layers; by gates.

    Args:
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1]; new matrices on the
            residual path (W_R) count as remaining.
        prune: calibration, gates, and their training.
        distillation: weights of the labels, the teacher's logits and its hidden states.
    """

    usual_density = 0.06
    prune: ProjectedPruning = ProjectedPruning()
    distillation: SP3Distillation = SP3Distillation()

    def own_stages(self) -> list[Stage]:
        """Return prune."""
        return [ProjectedStage(self.prune, self.density, self.round_to)]
