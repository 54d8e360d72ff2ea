"""Distillation settings and loss terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_compress.numerics.losses import LossKind
from lit_compress.utils.errors import UserError, require


@dataclass(frozen=True)
class Distillation:
    """Weights of the loss terms that compare the model with its teacher, the dense model:

        L = (1 - alpha) L_task + alpha L_logits + alpha_layers sum_l MSE(H_student^l, H_teacher^l)

    Logits as in CoFi and nn_pruning (LPAF names no form); hidden states, embeddings included, as in LoSparse (Li et al.
    2023, section 4.5 and App. E), whose weights of task, logits and layers are 1 : a : b; here alpha = a / (1 + a) and
    alpha_layers = b / (1 + a). Most of its runs have a = 0, b = 15.

    Args:
        alpha: weight of the teacher's logits; the labels have 1 - alpha. 0 turns their distillation off.
        temperature: temperature of both distributions; the term is scaled by its square.
        alpha_layers: weight of the hidden states; 0 turns their distillation off.
        mask_padding: compare hidden states of real tokens only; LoSparse's program compares padding too.
        relative: divide the error of every hidden state by the variance of the teacher's, so that one ``alpha_layers``
            serves models whose states have different scales.
    """

    alpha: float = 0.5
    temperature: float = 2.0
    alpha_layers: float = 0.0
    mask_padding: bool = False
    relative: bool = False
    matters: ClassVar[dict[str, Any]] = {
        "temperature": {"alpha": True},
        "mask_padding": {"alpha_layers": True},
        "relative": {"alpha_layers": True},
    }

    def __post_init__(self) -> None:
        require(self, "distillation.alpha", low=0, high=1)
        require(self, "distillation.temperature", above=0, hint="usual: 2.0")
        require(self, "distillation.alpha_layers", low=0)

    @property
    def on(self) -> bool:
        """Whether a teacher is needed."""
        return self.alpha > 0 or self.alpha_layers > 0

    @property
    def label_weight(self) -> float:
        """Weight of the loss on the labels."""
        return 1 - self.alpha

    def logits_weight(self, kind: LossKind) -> float:
        """Return the factor on the logits' term; for classes the term already has the square of the temperature."""
        return self.alpha


@dataclass(frozen=True)
class MappedDistillation(Distillation):
    """Distillation of hidden states that a learned map compares, with a weight of its own for the labels: CoFi, SP3.

    Args:
        alpha_labels: weight of the loss on the labels.
    """

    alpha_labels: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative:
            raise UserError("distillation.relative: True is not for layers that a learned map compares; False is valid")
        require(self, "distillation.alpha_labels", low=0)
        if not self.on and not self.alpha_labels:
            usual = type(self)
            raise UserError(
                "distillation: alpha, alpha_layers, alpha_labels are 0, nothing is learned; usual: "
                f"{usual.alpha}, {usual.alpha_layers}, 0"
            )

    @property
    def label_weight(self) -> float:
        """Weight of the labels; the rest is the teacher's."""
        return self.alpha_labels


def hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """Return the hidden states in a model's ``output``, for each stack (encoder, decoder): embeddings, then blocks."""
    if "encoder_hidden_states" in output:
        return [output.encoder_hidden_states, output.decoder_hidden_states]
    return [output.hidden_states]


def distillation_terms(
    settings: Distillation,
    kind: LossKind,
    losses: Mapping[str, Tensor],
    passes: Sequence[Sequence[Sequence[Tensor]]] | None,
    hidden: Sequence[Sequence[Tensor]],
    masks: Sequence[Tensor],
    layer_loss: Callable[..., Tensor],
    weights: Tensor | None = None,
    variances: Sequence[Sequence[Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return the weighted loss terms: ``task``, ``distillation`` (logits) and ``layers`` (hidden states) if asked for.

    Args:
        settings: the weights of the terms.
        kind: type of the head's output.
        losses: ``task`` and, with a weight for the teacher's logits, ``distillation``, as
            :func:`~lit_compress.numerics.losses.logits_losses` returns them.
        passes: the model's hidden states [b, length, width], per copy, stack (encoder, decoder) and layer; None to
            leave them out.
        hidden: the teacher's hidden states, per stack and layer.
        masks: [b, length] per stack, 0 at padding.
        layer_loss: distance between the hidden states of model and teacher in one stack (Stage.layer_loss).
        weights: [4] of means over samples, tokens of each stack, and rows (TaskType.counts); None: 1. ``losses`` are
            weighted already.
        variances: of the teacher's states, per stack and layer; None: they follow from ``hidden``.
    """
    terms = {"task": settings.label_weight * losses["task"]}
    if settings.alpha > 0:
        terms["distillation"] = settings.logits_weight(kind) * losses["distillation"]
    if passes is not None:
        distances = []
        for stacks in passes:
            for i, (states, target_states, mask) in enumerate(zip(stacks, hidden, masks, strict=False)):
                own = () if variances is None else (variances[i],)
                distance = layer_loss(states, target_states, mask if settings.mask_padding else None, settings, *own)
                if weights is not None:
                    distance = weights[1 + i if settings.mask_padding else -1] * distance
                distances.append(distance)
        terms["layers"] = settings.alpha_layers / len(passes) * torch.stack(distances).sum()
    return terms
