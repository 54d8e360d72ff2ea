"""What a stage hears of the teacher: settings, and the terms of the loss that come from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_compress.errors import UserError
from lit_compress.losses import Kind, distillation_loss, layer_distillation_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Distillation:
    """What a stage learns from the dense teacher besides the labels:

        L = (1 - alpha) L_task + alpha L_logits + alpha_layers sum_l MSE(H_student^l, H_teacher^l)

    Logits as in CoFi and nn_pruning (LPAF names no form); hidden states, embeddings included, as in LoSparse (Li et al.
    2023, section 4.5 and App. E), whose weights of task, logits and layers are 1 : a : b; here alpha = a / (1 + a) and
    alpha_layers = b / (1 + a). Most of its runs have a = 0, b = 15.

    Args:
        alpha: weight of the teacher's logits; the labels have 1 - alpha. 0 turns their distillation off.
        temperature: softens both distributions; the term is scaled by its square.
        alpha_layers: weight of the hidden states; 0 turns their distillation off.
        mask_padding: leave the positions of padding out of the hidden states; LoSparse's program has them in.
    """

    alpha: float = 0.5
    temperature: float = 2.0
    alpha_layers: float = 0.0
    mask_padding: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"distillation.alpha: {self.alpha} is not in [0, 1]; nearest {min(max(self.alpha, 0), 1)}")
        if self.temperature <= 0:
            raise UserError(f"distillation.temperature: {self.temperature} is not above 0; usual: 2.0")
        if self.alpha_layers < 0:
            raise UserError(f"distillation.alpha_layers: {self.alpha_layers} is below 0, the smallest valid value")

    @property
    def on(self) -> bool:
        """Whether a teacher is needed."""
        return self.alpha > 0 or self.alpha_layers > 0


def check_widths(settings: Distillation, net: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuse hidden states that cannot be compared.

    Raises:
        UserError: they are asked for and their widths differ.
    """
    width, width_teacher = net.config.hidden_size, teacher.config.hidden_size
    if settings.alpha_layers > 0 and width != width_teacher:
        raise UserError(
            f"distillation.alpha_layers: the teacher's hidden states are {width_teacher} wide, the net's {width}; "
            "give a teacher of the same width, or 0"
        )


def hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """Return the hidden states of every stack of blocks in a net's ``output``: embeddings, then every block."""
    if "encoder_hidden_states" in output:
        return [output.encoder_hidden_states, output.decoder_hidden_states]
    return [output.hidden_states]


def distillation_terms(
    settings: Distillation,
    kind: Kind,
    logits: Tensor,
    target: Tensor,
    counted: Tensor | None,
    passes: Sequence[Sequence[Sequence[Tensor]]] | None,
    hidden: Sequence[Sequence[Tensor]],
    masks: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return the weighted terms of the teacher: ``distillation`` (logits) and ``layers``, those asked for.

    Args:
        settings: the weights.
        kind: what the head predicts.
        logits: the net's, [copies * b, ..., classes]; the copies stand one after the other.
        target: the teacher's, [b, ..., classes].
        counted: bool [b, ...], which distributions are compared; None for all.
        passes: per copy and stack of blocks the net's hidden states, [b, length, width] each; None if they are not
            asked for.
        hidden: the teacher's, per stack.
        masks: [b, length] per stack, 0 for padding.
    """
    terms = {}
    if settings.alpha > 0:
        copies = len(logits) // len(target)
        target, counted = torch.cat([target] * copies), None if counted is None else torch.cat([counted] * copies)
        loss = distillation_loss(logits, target, kind, settings.temperature, counted)
        terms["distillation"] = settings.alpha * loss
    if passes is not None:
        losses = [
            layer_distillation_loss(states, target_states, mask if settings.mask_padding else None)
            for stacks in passes
            for states, target_states, mask in zip(stacks, hidden, masks, strict=False)
        ]
        terms["layers"] = settings.alpha_layers / len(passes) * torch.stack(losses).sum()
    return terms
