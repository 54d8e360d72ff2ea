"""CoFi: coarse- and fine-grained pruning of layers, heads, neurons and hidden dimensions, with distillation.

Mengzhou Xia, Zexuan Zhong, Danqi Chen, "Structured Pruning Learns Compact and Accurate Models", ACL 2022,
https://arxiv.org/abs/2204.00408; open points follow https://github.com/princeton-nlp/CoFiPruning.

    section 3.1   gates z_MHA, z_FFN, z_head, z_int, z_hidden; a weight stays iff all of its gates are open
                  expected size, hard-concrete gates; max over lambda, min over z and weights:
                  L + lambda1 (s - t) + lambda2 (s - t)^2    numerics/hard_concrete.py, gates.py, stages/gated.py
    section 3.2   L = alpha KL(teacher || student) + alpha_layers sum_i MSE(W H_s^m(i), H_t^i)         MatchedLayers

Stages: dense (the teacher) -> distil (the backbone learns from it) -> prune (gates) -> the model is cut -> retrain.

Deviations:
    - Expectation and target are densities of the block matrices' weights, as everywhere here; CoFi's are sparsities,
      which turns the sign of lambda1. Biases are not counted.
    - The distillation before pruning is a stage of its own, so AdamW and its schedule begin again with the gates, as
      in CoFi's program. With ``prune.init finetuned`` it is left out: the dense model itself is pruned.
    - A removed layer is never matched with a teacher layer (their program marks the wrong ones as removed); a layer
      exists while its attention or its feed-forward network does.
    - The model that is evaluated is the one that would be exported. Sub-layers without open heads or neurons are
      closed, and their LayerNorm is skipped. The units kept are those that fit the budget. An epoch may count as the
      best only after the target's warm-up.
    - The values of open gates are folded into rows, biases, embeddings and LayerNorms, which is exact (cut.py).
    - Embeddings are not trained, as in their program. Retraining has the usual decaying learning rate.
    - ELECTRA, DeBERTa, OPT and BART keep their hidden dimensions; BART's layers are not matched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_compress.methods.base import Method
from lit_compress.methods.cofi.gates import gate_net, gated_size, possible_gates, set_gates
from lit_compress.models.cut import SUBLAYER_GATES, close_empty_sublayers, cut_closed
from lit_compress.models.outline import cut_evenly
from lit_compress.models.residual_stream import stream_width
from lit_compress.models.sites import Model, embedding_params, is_removed, of_kind, sublayers
from lit_compress.models.surgery import Structure
from lit_compress.numerics.foreach import constant
from lit_compress.numerics.losses import States
from lit_compress.stages.base import Stage, Training
from lit_compress.stages.distillation import MappedDistillation
from lit_compress.stages.gated import GatedStage, GatedTraining
from lit_compress.stages.micro_batches import MicroBatches
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import sum_over_ranks

_CLAMP = (-4.6051702, 4.6051702)  # log of 1/100 and 100
_START = 10.0  # of log_alpha: open; neurons start at 0, open with probability 0.83


@dataclass(frozen=True)
class CoFiPruning(GatedTraining):
    """What is pruned, and how gates are trained.

    Args:
        init: ``pretrained`` prunes the backbone after the stage ``distil``, as the paper does; ``finetuned`` prunes the
            dense model.
    """

    init: Literal["pretrained", "finetuned"] = "pretrained"


@dataclass(frozen=True)
class CoFiDistillation(MappedDistillation):
    """CoFi's distillation loss (Xia et al. 2022, section 3.2):

        L = alpha_labels L_task + alpha L_logits + alpha_layers sum_i MSE(W H_student^m(i), H_teacher^i)

    over four teacher layers, each compared with the student layer nearest to it, in order; W is learned.

    Args:
        alpha: weight of the teacher's logits.
        mask_padding: compare hidden states of real tokens only; CoFi's program compares padding too.
    """

    alpha: float = 0.1
    alpha_layers: float = 0.9


class MatchedLayers(nn.Module):
    """The distance between four teacher layers and the student layers nearest to them, matched again in every forward.

    Attributes:
        projection: Linear with W [teacher width, student width], the identity at the start, and a bias.
        exists: bool [student layers], which student layers may be matched; set from outside.
    """

    exists: Tensor

    def __init__(self, width: int, width_teacher: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width_teacher)
        self.register_buffer("exists", None, persistent=False)  # lies where the hidden states do
        nn.init.eye_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    @torch.no_grad()
    def shrink(self, open_: Tensor) -> None:
        """Keep the inputs ``open_`` (bool [student width]) of the projection, those that the student still has."""
        self.projection.weight = nn.Parameter(self.projection.weight[:, open_].contiguous())

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None,
        over_step: Callable[[Tensor], None] = sum_over_ranks,
    ) -> Tensor:  # fmt: skip
        """Return the sum over the matched pairs of the mean squared error, 0-dim float32.

        States are the embedding output, then every layer's [batch, length, width]; ``mask`` [batch, length] is not 0 at
        real tokens, None: padding is compared too. ``over_step`` sums distances over the step, in place, so that all of
        its micro-batches compare the same layers.
        """
        states = torch.stack(list(student[1:]))
        targets = [teacher[1 + layer] for layer in quarters(len(teacher) - 1)]
        with torch.no_grad():
            near = [[_error(state, target, mask) for target in targets] for state in self.projection(states)]
            distances = torch.stack([torch.stack(row) for row in near])
            distances *= len(states[0]) if mask is None else mask.sum()  # sums, which the tokens of others are added to
            over_step(distances)
            chosen, valid = match_layers(distances, self.exists)
        projected = self.projection(states[chosen])
        errors = torch.stack([_error(state, target, mask) for state, target in zip(projected, targets, strict=True)])
        return (errors * valid).sum()


def match_layers(distances: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """Choose for every teacher layer the student layer it is compared with (CoFi, "dynamically", version 4).

    From the last teacher layer to the first, this is the nearest student layer that exists and comes before the one
    chosen last. CoFi's program marks removed layers by their place in a sorted list, not by their number, and so
    compares with removed ones. A teacher layer for which no student layer is left is left out.

    Args:
        distances: [student layers, teacher layers].
        exists: bool [student layers], False = removed.

    Returns:
        int64 [teacher layers], the student layer; and bool [teacher layers], False = left out.
    """
    layers = torch.arange(len(distances), device=distances.device)
    last = torch.full((), len(distances), device=distances.device)
    chosen, valid = [], []
    for column in distances.unbind(1)[::-1]:
        candidates = exists & (layers < last)
        last = column.masked_fill(~candidates, torch.inf).argmin()  # the first one if there is none
        chosen.append(last)
        valid.append(candidates.any())
    return torch.stack(chosen[::-1]), torch.stack(valid[::-1])


def quarters(layers: int) -> list[int]:
    """Return the last layer of each quarter, counted from 0: 2, 5, 8, 11 of 12."""
    return sorted({-(-quarter * layers // 4) - 1 for quarter in (1, 2, 3, 4)})


def _error(state: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    with torch.autocast(state.device.type, enabled=False):
        error = (state.float() - target.float()).square().mean(-1)
        return error.mean() if mask is None else (error * mask).sum() / mask.sum()


class MatchedStage(Stage):
    """A stage that compares the model's layers with the teacher's; the embeddings are frozen.

    ``distil`` trains the backbone with the dense model as its teacher, ``retrain`` the pruned, smaller model.

    Attributes:
        matching: the comparison of layers and its projection W; None if layers are not compared.
    """

    matching: MatchedLayers | None
    matches = repeatable = True

    def __init__(self, name: str, settings: Training, distillation: CoFiDistillation) -> None:
        super().__init__(name, settings)
        self.distillation, self.from_backbone = distillation, name == "distil"

    def check(self, net: Model) -> None:
        """Refuse to compare layers of a model with an encoder and a decoder."""
        super().check(net)
        if net.config.is_encoder_decoder and self.distillation.alpha_layers > 0:
            raise UserError(
                f"distillation.alpha_layers: layers of {net.config.model_type}, an encoder and a decoder, cannot be "
                "matched; valid: 0"
            )

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Freeze the embeddings."""
        net = super().begin(net, method, structure)
        for parameter in embedding_params(net):
            parameter.requires_grad_(False)
        return net

    def attach(self, net: Model) -> None:
        """Make the projection W, from the values of the stage before if there are any."""
        super().attach(net)
        self.matching = None
        if self.distillation.alpha_layers > 0:
            self.matching = MatchedLayers(stream_width(net), net.config.hidden_size)
            self.matching.exists = open_layers(net)
            if self.previous is not None and (file := self.previous / "projection.safetensors").is_file():
                from safetensors.torch import load_file

                self.matching.load_state_dict(load_file(file))

    def param_groups(self, net: Model) -> list[dict[str, Any]]:
        """Train the projection with the model; its gradients are not clipped, because it is not sharded."""
        groups = super().param_groups(net)
        if self.matching is None:
            return groups
        return [*groups, {"params": list(self.matching.parameters()), "weight_decay": 0.0, "clip": False}]

    def layer_loss(self, student: States, teacher: States, mask: Tensor | None, relative: bool | States) -> Tensor:
        """Return the distance between matched layers of student and teacher."""
        assert self.matching is not None
        return self.matching(student, teacher, mask, self.over_step)


class GatedPruning(MatchedStage, GatedStage):
    """The stage ``prune``: train weights and gates together, then remove the closed parts."""

    settings: CoFiPruning
    repeatable = False  # gates are drawn
    clamp = _CLAMP
    finest = "neurons"

    def __init__(
        self, settings: CoFiPruning, density: float, distillation: CoFiDistillation, round_to: int | None = None
    ) -> None:
        GatedStage.__init__(self, settings, density, round_to)
        self.distillation, self.from_backbone = distillation, False

    def plain(self) -> Stage:
        """Return the stage that only compares layers."""
        return MatchedStage(self.name, self.settings, self.distillation)

    def names(self, net: Model) -> tuple[str, ...]:
        """Return the names of the gates that ``net`` gets: all that it can have."""
        return possible_gates(net)

    def check(self, net: Model) -> None:
        """Refuse architectures without gates, and a density that the gates cannot reach."""
        super().check(net)
        names = self.names(net)
        size = gated_size(net, names)
        low, high = (
            float(size.density({name: torch.full(shape, bound) for name, shape in size.shapes.items()}))
            for bound in _CLAMP
        )
        if not low <= self.density <= high:
            raise UserError(
                f"model.density: {self.density:g} cannot be reached with the gates {', '.join(names)}; "
                f"they reach {low:.4f} to {high:.4f}"
            )

    def outline(self, net: Model) -> Model:
        """Return ``net`` with fewer heads and neurons; training decides which ones, and which layers, are removed."""
        return cut_evenly(net, self.density)

    def begin(self, net: Model, method: MicroBatches, structure: Structure | None) -> Model:
        """Put gates into the model of the stage before."""
        net = super().begin(net, method, structure)
        names = self.names(net)
        self.make_gates(gated_size(net, names), _START, ("hidden",), means={"neurons": 0.0})
        self.initial = 1.0  # the target starts at the dense model, the expectation a little below
        gate_net(net, names)
        return net

    def set_gates(self, net: Model, z: dict[str, Tensor], deterministic: bool = False) -> None:
        """Give the gated layers their values; layers whose sub-layers are all closed are not matched."""
        z = close_empty_sublayers(z) if deterministic else z
        set_gates(net, z, deterministic)
        if self.matching is not None:
            self.matching.exists = open_layers(net, z)

    def deploy(self, net: Model) -> None:
        """Remove the closed parts, also from the inputs of the projection."""
        z = close_empty_sublayers(self.deterministic(net, self.total_steps))
        cut_closed(net, z)
        if self.matching is not None and "hidden" in z:
            self.matching.shrink(z["hidden"][0] > 0)

    def finish(self, net: Model, folder: Path) -> None:
        """Write the projection, from which the next stage continues."""
        if self.matching is not None:
            from safetensors.torch import save_file

            save_file(self.matching.state_dict(), folder / "projection.safetensors")


def open_layers(net: Model, z: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """Return which layers have a sub-layer that was not removed and is open by the gates ``z``, bool [layers]."""
    parts, device = sublayers(net), next(iter(z.values()), torch.zeros(0)).device
    open_ = torch.zeros(1 + parts[-1].layer, dtype=torch.bool, device=device)
    for kind, (gate, _) in SUBLAYER_GATES.items():
        left = [part.layer for part in of_kind(parts, kind) if not is_removed(net, part)]
        open_[constant(tuple(left), device)] |= (z[gate] > 0).flatten() if gate in z else True
    return open_


class CoFi(Method):
    """Prune layers, heads, neurons and hidden dimensions together; the export is a smaller dense model.

    Args:
        distil: training of the backbone with the dense model as teacher, before it is pruned.
        prune: training of weights and gates.
        retrain: training of the pruned model.
        distillation: weights of the labels, the teacher's logits and its hidden states.
    """

    pruning: ClassVar[type[GatedPruning]] = GatedPruning  # the class of the stage
    usual_density = 0.2
    distil: Training = Training(epochs=1, warmup=0.0)
    prune: CoFiPruning = CoFiPruning(epochs=19, warmup=0.0, target_warmup=0.1)
    retrain: Training = Training(epochs=20)
    distillation: CoFiDistillation = CoFiDistillation()

    def own_stages(self) -> list[Stage]:
        """Return distil (from the backbone), prune, retrain."""
        distil = [MatchedStage("distil", self.distil, self.distillation)] if self.prune.init == "pretrained" else []
        prune = self.pruning(self.prune, self.density, self.distillation, self.round_to)
        return [*distil, prune, MatchedStage("retrain", self.retrain, self.distillation)]
