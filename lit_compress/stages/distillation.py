"""Settings of a distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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
        temperature: temperature of both distributions, if the answers are classes; the term is scaled by its square.
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
            usual = f"{type(self).alpha}, {type(self).alpha_layers}, 0"
            raise UserError(
                f"distillation: alpha, alpha_layers, alpha_labels are 0, nothing is learned; usual: {usual}"
            )

    @property
    def label_weight(self) -> float:
        """Weight of the labels; the rest is the teacher's."""
        return self.alpha_labels
