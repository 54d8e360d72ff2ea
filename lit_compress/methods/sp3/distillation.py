"""SP3's distillation settings."""

from __future__ import annotations

from dataclasses import dataclass

from lit_compress.numerics.losses import LossKind
from lit_compress.stages.distillation import Distillation
from lit_compress.utils.errors import UserError, require


@dataclass(frozen=True)
class SP3Distillation(Distillation):
    """The distillation loss of SP3's program (Hu et al. 2024):

        L = alpha_labels L_task + alpha KL + alpha_layers sum_i MSE(A H_student^i, H_teacher^m(i))

    m(i) is the nearest teacher hidden state at or above layer i; A is learned. KL has no factor temperature^2.

    Args:
        alpha: weight of the teacher's logits.
        temperature: temperature of both distributions.
        alpha_layers: weight of the hidden states; 0 turns their distillation off.
        mask_padding: compare hidden states of real tokens only.
        alpha_labels: weight of the loss on the labels; the program does not use them.
        squared_temperature: multiply the logits' term by the square of the temperature.
    """

    alpha: float = 0.3
    alpha_layers: float = 0.7
    mask_padding: bool = True
    alpha_labels: float = 0.0
    squared_temperature: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.relative:
            raise UserError("distillation.relative: True is not for layers that a learned map compares; False is valid")
        require(self, "distillation.alpha_labels", low=0)
        if not self.on and not self.alpha_labels:
            raise UserError(
                "distillation: alpha, alpha_layers, alpha_labels are 0, nothing is learned; usual: 0.3, 0.7, 0"
            )

    @property
    def label_weight(self) -> float:
        """Weight of the labels; the rest is the teacher's."""
        return self.alpha_labels

    def logits_weight(self, kind: LossKind) -> float:
        """Return the factor on the logits' term; without ``squared_temperature`` it takes out that term's factor."""
        return self.alpha / (self.temperature**2 if kind == "classification" and not self.squared_temperature else 1)
