"""What a stage hears of the teacher: settings, and the terms of the loss that come from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_compress.errors import UserError
from lit_compress.losses import Kind, distillation_loss, layer_distillation_loss, match_layers

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

    @property
    def label_weight(self) -> float:
        """Weight of the labels beside the teacher."""
        return 1 - self.alpha

    def logits_weight(self, kind: Kind) -> float:
        """Weight of the distance of the logits; that of classes is already scaled by the square of the temperature."""
        return self.alpha


@dataclass(frozen=True)
class LaterDistillation(Distillation):
    """The form of SP3's program (Hu et al. 2024):

        L = alpha_labels L_task + alpha KL + alpha_layers sum_i MSE(A H_student^i, H_teacher^m(i))

    m(i) is the nearest of the teacher's hidden states that are not below; A is learned. KL has no factor temperature^2.

    Args:
        alpha: weight of the teacher's logits.
        temperature: softens both distributions.
        alpha_layers: weight of the hidden states; 0 turns their distillation off.
        mask_padding: leave the positions of padding out of the hidden states.
        alpha_labels: weight of the labels; the program does not read them.
        squared_temperature: scale the logits' term by the square of the temperature.
    """

    alpha: float = 0.3
    alpha_layers: float = 0.7
    mask_padding: bool = True
    alpha_labels: float = 0.0
    squared_temperature: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_labels < 0:
            raise UserError(f"distillation.alpha_labels: {self.alpha_labels} is below 0, the smallest valid value")
        if not self.on and not self.alpha_labels:
            raise UserError(
                "distillation: alpha, alpha_layers, alpha_labels are 0, nothing is learned; usual: 0.3, 0.7, 0"
            )

    @property
    def label_weight(self) -> float:
        """Weight of the labels beside the teacher."""
        return self.alpha_labels

    def logits_weight(self, kind: Kind) -> float:
        """Weight of the distance of the logits; that of classes is already scaled by the square of the temperature."""
        return self.alpha / (self.temperature**2 if kind == "classification" and not self.squared_temperature else 1)


@dataclass(frozen=True)
class MatchedDistillation(Distillation):
    """CoFi's form of it (Xia et al. 2022, section 3.2):

        L = alpha_labels L_task + alpha L_logits + alpha_layers sum_i MSE(W H_student^m(i), H_teacher^i)

    over four teacher layers, each compared with the student layer nearest to it, in order; W is learned.

    Args:
        alpha: weight of the teacher's logits.
        temperature: softens both distributions; the term is scaled by its square.
        alpha_layers: weight of the hidden states; 0 turns their distillation off.
        mask_padding: leave the positions of padding out of the hidden states; CoFi's program has them in.
        alpha_labels: weight of the labels; CoFi does not read them.
    """

    alpha: float = 0.1
    alpha_layers: float = 0.9
    alpha_labels: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_labels < 0:
            raise UserError(f"distillation.alpha_labels: {self.alpha_labels} is below 0, the smallest valid value")
        if not self.on and not self.alpha_labels:
            raise UserError(
                "distillation: alpha, alpha_layers, alpha_labels are 0, nothing is learned; usual: 0.1, 0.9, 0"
            )

    @property
    def label_weight(self) -> float:
        """Weight of the labels beside the teacher."""
        return self.alpha_labels


class MatchedLayers(nn.Module):
    """The distance of a student's layers from four of the teacher's, each matched anew in every forward.

    Attributes:
        projection: W [teacher width, student width], the identity at the start, and its bias.
        exists: bool [student layers], which take part; None for all.
    """

    exists: Tensor | None = None

    def __init__(self, width: int, width_teacher: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width_teacher)
        with torch.no_grad():
            self.projection.weight.copy_(torch.eye(width_teacher, width))
            self.projection.bias.zero_()

    @torch.no_grad()
    def shrink(self, open_: Tensor) -> None:
        """Keep the inputs ``open_`` (bool [student width]): the student has lost the other dimensions."""
        weight, bias = self.projection.weight[:, open_], self.projection.bias
        self.projection = nn.Linear(weight.shape[1], weight.shape[0])
        self.projection.weight, self.projection.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias)

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return the sum over the matched pairs of the mean squared error, 0-dim float32.

        Args:
            student: embedding output, then every layer's [batch, length, width].
            teacher: the same of the teacher.
            mask: [batch, length], not 0 where a token is; None: padding is compared too.
        """
        states = torch.stack(list(student[1:]))
        targets = [teacher[1 + layer] for layer in quarters(len(teacher) - 1)]
        exists = self.exists
        if exists is None:
            exists = torch.ones(len(states), dtype=torch.bool, device=states.device)
        with torch.no_grad():
            near = [[_error(state, target, mask) for target in targets] for state in self.projection(states)]
            chosen, valid = match_layers(torch.stack([torch.stack(row) for row in near]), exists)
        self.chosen = chosen.where(valid, -1)
        found = self.projection(states[chosen])
        errors = torch.stack([_error(state, target, mask) for state, target in zip(found, targets, strict=True)])
        return (errors * valid).sum()


def quarters(layers: int) -> list[int]:
    """Return the last layer of each quarter, counted from 0: 2, 5, 8, 11 of 12."""
    return sorted({-(-quarter * layers // 4) - 1 for quarter in (1, 2, 3, 4)})


def _error(state: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    with torch.autocast(state.device.type, enabled=False):
        error = (state.float() - target.float()).square().mean(-1)
        return error.mean() if mask is None else (error * mask).sum() / mask.sum()


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
    layer_loss: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None], Tensor] = layer_distillation_loss,
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
        layer_loss: compares hidden states of a stack of the net and of the teacher.
    """
    terms = {}
    if settings.alpha > 0:
        copies = len(logits) // len(target)
        target, counted = torch.cat([target] * copies), None if counted is None else torch.cat([counted] * copies)
        loss = distillation_loss(logits, target, kind, settings.temperature, counted)
        terms["distillation"] = settings.logits_weight(kind) * loss
    if passes is not None:
        losses = [
            layer_loss(states, target_states, mask if settings.mask_padding else None)
            for stacks in passes
            for states, target_states, mask in zip(stacks, hidden, masks, strict=False)
        ]
        terms["layers"] = settings.alpha_layers / len(passes) * torch.stack(losses).sum()
    return terms
