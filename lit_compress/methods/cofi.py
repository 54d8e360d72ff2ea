"""CoFi: coarse- and fine-grained pruning of layers, heads, neurons and hidden dimensions, with distillation.

Mengzhou Xia, Zexuan Zhong, Danqi Chen, "Structured Pruning Learns Compact and Accurate Models", ACL 2022,
https://arxiv.org/abs/2204.00408; what it leaves open is as in https://github.com/princeton-nlp/CoFiPruning.

    section 3.1   gates z_MHA, z_FFN, z_head, z_int, z_hidden; a weight stays iff all of its gates are open
                  expected size, hard-concrete gates; max over lambda, min over z and weights:
                  L + lambda1 (s - t) + lambda2 (s - t)^2                  gates.py, gating.py, methods/gated_stage.py
    section 3.2   L = alpha KL(teacher || student) + alpha_layers sum_i MSE(W H_s^m(i), H_t^i)         distillation.py

Stages: dense (the teacher) -> distil (the backbone learns from it) -> prune (gates) -> the net is cut -> retrain.

Deviations:
    - Expectation and target are densities of the block matrices' weights, as everywhere here; theirs, of sparsity,
      turns lambda1's sign. Biases are not counted.
    - The distillation before pruning is a stage of its own, so AdamW and its schedule begin anew with the gates, as
      theirs do. With ``prune.init finetuned`` it is left out: the dense net itself is pruned.
    - A removed layer is never matched with a teacher's (their program marks the wrong ones); a layer exists while its
      attention or its feed-forward network does.
    - What is evaluated is what would be exported: sub-layers without units are closed, their LayerNorm is skipped; and
      with ``prune.exact_target`` the units kept are those that fit the budget. Only from the end of the target's
      warm-up on may an epoch count as the best.
    - The values of open gates are folded into rows, biases, embeddings and LayerNorms, which is exact (shrink.py).
    - Embeddings are not trained, as in their program. Retraining has the usual decaying learning rate.
    - ELECTRA, DeBERTa, OPT and BART keep their hidden dimensions; BART's layers are not matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from lit_compress.errors import UserError, nearest
from lit_compress.families import embedding_params
from lit_compress.gates import Size
from lit_compress.gating import (
    Gate,
    canonical,
    counted,
    gate_net,
    gate_shapes,
    least_units,
    of_kind,
    place,
    possible_gates,
)
from lit_compress.layers import HardConcrete, Nothing
from lit_compress.methods.base import Method
from lit_compress.methods.distillation import MatchedDistillation, MatchedLayers
from lit_compress.methods.gated_stage import GatedStage, GatedTraining, average_gradients
from lit_compress.methods.stage import Host, Stage, Training
from lit_compress.shrink import shrink
from lit_compress.sublayers import stream_width, sublayers
from lit_compress.surgery import Structure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLAMP = (-4.6051702, 4.6051702)  # log of 1/100 and 100
_START = 10.0  # of log_alpha: open; neurons start at 0, open with probability 0.83


@dataclass(frozen=True)
class CoFiPruning(GatedTraining):
    """How the gates learn, and which there are.

    Args:
        gates: of ``attention``, ``ffn``, ``heads``, ``neurons``, ``hidden``; None for all that the family can have.
        init: start from the pre-trained backbone after distillation, as the paper does, or from the fine-tuned net.
    """

    gates: list[str] | None = None
    init: Literal["pretrained", "finetuned"] = "pretrained"

    def __post_init__(self) -> None:
        super().__post_init__()
        for gate in self.gates or ():
            if gate not in get_args(Gate):
                raise UserError(f"prune.gates: unknown gate '{gate}'; {nearest(gate, get_args(Gate))}")
        if self.gates is not None and not self.gates:
            raise UserError(f"prune.gates: [] leaves nothing to prune; some of {', '.join(get_args(Gate))}")


class MatchedStage(Stage):
    """A stage that listens to the teacher's layers through matched layers and leaves the embeddings alone.

    Args:
        distillation: whether layers are compared at all.
    """

    distillation: MatchedDistillation
    matching: MatchedLayers | None

    def check(self, net: PreTrainedModel) -> None:
        """Refuse to match the layers of two stacks."""
        super().check(net)
        if net.config.is_encoder_decoder and self.distillation.alpha_layers > 0:
            raise UserError(
                f"distillation.alpha_layers: layers of {net.config.model_type}, an encoder and a decoder, cannot be "
                "matched; valid: 0"
            )

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Freeze the embeddings; note what the projection starts from."""
        net = super().build(method, previous, structure)
        for parameter in embedding_params(net):
            parameter.requires_grad_(False)
        self._projection = None if previous is None else previous / "projection.safetensors"
        return net

    def attach(self, net: PreTrainedModel) -> None:
        """Make the projection."""
        super().attach(net)
        mesh = getattr(next(net.parameters()), "device_mesh", None)
        self._group = None if mesh is None else mesh.get_group()
        self.matching = None
        if self.distillation.alpha_layers > 0:
            self.matching = MatchedLayers(stream_width(net), net.config.hidden_size)
            self.matching.exists = existing(net)
            if self._projection is not None and self._projection.is_file():
                from safetensors.torch import load_file

                self.matching.load_state_dict(load_file(self._projection))

    def own_groups(self, net: PreTrainedModel) -> list[dict[str, Any]]:
        """Train the projection beside the net; it is not sharded, so it is clipped by nobody."""
        groups = super().own_groups(net)
        if self.matching is None:
            return groups
        return [*groups, {"params": list(self.matching.parameters()), "weight_decay": 0.0, "clip": False}]

    def layer_loss(self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Match, project, compare."""
        assert self.matching is not None
        return self.matching(student, teacher, mask)

    def before_step(self, net: PreTrainedModel) -> None:
        """Average the projection's gradients where no strategy does it."""
        super().before_step(net)
        if self.matching is not None:
            average_gradients(self.matching.parameters(), self._group)

    def status(self, net: PreTrainedModel, step: int) -> dict[str, float]:
        """Also show which layer each of the teacher's was compared with, -1 for none."""
        found = super().status(net, step)
        chosen = getattr(self.matching, "chosen", None)
        return found | {f"matched_{i}": float(layer) for i, layer in enumerate([] if chosen is None else chosen)}


class Distilling(MatchedStage):
    """The backbone learns from the dense net."""

    from_backbone = True

    def __init__(self, settings: Training, distillation: MatchedDistillation) -> None:
        super().__init__("distil", settings)
        self.distillation = distillation


class Retraining(MatchedStage):
    """The cut net is trained on."""

    def __init__(self, settings: Training, distillation: MatchedDistillation) -> None:
        super().__init__("retrain", settings)
        self.distillation = distillation


class GatedPruning(MatchedStage, GatedStage):
    """Train weights and gates; leave the cut net.

    Args:
        settings: how.
        density: final fraction of the weights.
        distillation: how the teacher is listened to.
    """

    settings: CoFiPruning
    clamp = _CLAMP

    def __init__(self, settings: CoFiPruning, density: float, distillation: MatchedDistillation) -> None:
        GatedStage.__init__(self, "prune", settings, density)
        self.distillation = distillation

    def names(self, net: PreTrainedModel) -> list[Gate]:
        """Return the gates there are.

        Raises:
            UserError: the family has no such gate.
        """
        possible = possible_gates(net)
        for gate in self.settings.gates or ():
            if gate not in possible:
                raise UserError(
                    f"prune.gates: '{gate}' cannot be gated in {net.config.model_type}; valid: {', '.join(possible)}"
                )
        return [gate for gate in possible if self.settings.gates is None or gate in self.settings.gates]

    def check(self, net: PreTrainedModel) -> None:
        """Refuse gates that the family lacks, and a density the gates cannot have."""
        super().check(net)
        if self.density == 1:
            return
        names = self.names(net)
        low, high = reachable(counted(net, names))
        if not low <= self.density <= high:
            raise UserError(
                f"model.density: {self.density:g} cannot be reached with the gates {', '.join(names)}; "
                f"they reach {low:.4f} to {high:.4f}"
            )

    def build(self, method: Host, previous: Path | None, structure: Structure | None) -> PreTrainedModel:
        """Put gates into the net of the stage before."""
        net = super().build(method, previous, structure)
        if self.density < 1:
            names, least = self.names(net), least_units(self.names(net))
            size = counted(net, names)
            self.finest = next((name for name in ("neurons", "heads", "hidden") if name in names), None)
            gates = {
                name: HardConcrete(*shape, 0.0 if name == "neurons" else _START, least[name], seed)
                for seed, (name, shape) in enumerate(gate_shapes(net, names).items())
            }
            self.make_gates(gates, size)
            self.initial = 1.0  # the target starts at the dense net, the expectation a little below
            self.replace(net, names)
        return net

    def replace(self, net: PreTrainedModel, names: list[Gate]) -> None:
        """Put the gated layers into ``net``."""
        gate_net(net, names)

    def place(self, net: PreTrainedModel, z: dict[str, Tensor], settled: bool = False) -> None:
        """Put the values into the gated layers; layers whose sub-layers are all closed are not matched."""
        z = canonical(z) if settled else z
        place(net, z, settled)
        if self.matching is not None:
            self.matching.exists = open_layers(net, z)

    def finish(self, net: PreTrainedModel, folder: Path) -> None:
        """Cut the net; pass the projection on."""
        if not self.gates:
            return
        z = canonical(self.settle(net, self.total_steps))
        shrink(net, z)
        if self.matching is not None:
            from safetensors.torch import save_file

            if "hidden" in z:
                self.matching.shrink(z["hidden"][0] > 0)
            save_file(self.matching.state_dict(), folder / "projection.safetensors")


def reachable(size: Size) -> tuple[float, float]:
    """Return the lowest and the highest density that clamped gates can expect."""
    low, high = (
        float(size.density({name: torch.full(shape, bound) for name, shape in size.shapes.items()})) for bound in _CLAMP
    )
    return low, high


def open_layers(net: PreTrainedModel, z: dict[str, Tensor]) -> Tensor:
    """Return which layers have an open sub-layer, bool [layers]."""
    parts = sublayers(net)
    found = torch.zeros(1 + parts[-1].layer, dtype=torch.bool, device=next(iter(z.values())).device)
    for kind in ("attention", "ffn"):
        layers = torch.tensor([part.layer for part in of_kind(parts, kind)], device=found.device)
        found[layers] |= (z[kind] > 0).flatten() if kind in z else True
    return found


def existing(net: PreTrainedModel) -> Tensor:
    """Return which layers of a cut net have a sub-layer left, bool [layers]."""
    parts = sublayers(net)
    found = torch.zeros(1 + parts[-1].layer, dtype=torch.bool)
    for part in parts:
        found[part.layer] |= not any(isinstance(net.get_submodule(name), Nothing) for name in part.stubs)
    return found


class CoFi(Method):
    """Prune layers, heads, neurons and hidden dimensions together; what is exported is a smaller net.

    Args:
        task: name of the task; the data is read for the same one.
        backbone: folder or hub name of the pre-trained model, or ``embedded`` for a small one built here.
        density: remaining / original parameters of the transformer blocks' matrices, in (0, 1].
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
        density: float = 0.2,
        teacher: str | None = None,
        dense: Training = Training(),
        distil: Training = Training(epochs=1, warmup=0.0),
        prune: CoFiPruning = CoFiPruning(epochs=19, warmup=0.0, target_warmup=0.1),
        retrain: Training = Training(epochs=20),
        distillation: MatchedDistillation = MatchedDistillation(),
    ) -> None:
        super().__init__(task, backbone, density, teacher, distillation)
        self.dense, self.distil, self.prune, self.retrain = dense, distil, prune, retrain
        self.matched = distillation

    def stages(self) -> list[Stage]:
        """Return dense (without a teacher), distil (from the backbone), prune, retrain."""
        distil = [Distilling(self.distil, self.matched)] if self.prune.init == "pretrained" else []
        prune = GatedPruning(self.prune, self.density, self.matched)
        return [*self.first(self.dense), *distil, prune, Retraining(self.retrain, self.matched)]
