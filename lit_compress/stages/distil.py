"""Distillation of a compressed model: the stage with which ``factorize --distil`` ends.

All parameters of the compressed model learn the dense model's logits and hidden states on texts. By default labels
have no weight in the loss, and the settings of :class:`Distillation` are

    L = L_logits + 10 sum over l of MSE(H^l, H_dense^l) / Var(H_dense^l)

with the same ratio of both terms as the stages of SecondOrder. Hidden states that have other axes are left out. Nothing
is dropped out. The rest is the same as in any stage of ``fit``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_compress.stages.base import Training
from lit_compress.stages.compression import CompressedStage, Compression
from lit_compress.stages.distillation import Distillation
from lit_compress.utils.errors import UserError

LOSSES = Distillation(alpha=1.0, alpha_layers=10.0, mask_padding=True, relative=True)
RATE = 3e-4  # for 32 texts a step


@dataclass(frozen=True)
class Recovery:
    """How a compressed model is trained afterwards.

    Args:
        refine: steps for every block, each by itself (stages/refinement.py); None: none.
        distil: steps for the whole model; None: none.
        texts: file of the texts of ``distil``; None: the training texts.
        rate: learning rate of ``distil``; None: :data:`RATE`.
    """

    refine: int | None = None
    distil: int | None = None
    texts: str | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        for option, steps in (("refine", self.refine), ("distil", self.distil)):
            if steps is not None and steps < 1:
                raise UserError(f"--{option}: {steps} is below 1, the smallest valid value; usual: 100")
        for option, value in (("texts", self.texts), ("rate", self.rate)):
            if value is not None and self.distil is None:
                raise UserError(f"--distil_{option}: '{value}' is read by --distil only; add --distil 100")
        if self.rate is not None and not 0 < self.rate < 1:
            raise UserError(f"--distil_rate: {self.rate:g} is not between 0 and 1; usual: {RATE:g}")
        if self.texts is not None and not Path(self.texts).expanduser().is_file():
            raise UserError(f"--distil_texts: '{self.texts}' is no file; give one, e.g. texts.txt with a text a line")


class DistilStage(CompressedStage):
    """Trains a model that was compressed before.

    Args:
        training: its settings.
    """

    drops_out = False

    def __init__(self, training: Training) -> None:
        super().__init__("distil", training, Compression())

    @property
    def rate_option(self) -> str:
        """The option that sets the learning rate."""
        return "--distil_rate"
