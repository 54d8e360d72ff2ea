"""CoFi's distillation: its settings, and the comparison of the student's layers with four teacher layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_compress.stages.distillation import MappedDistillation
from lit_compress.utils.sharding import sum_over_ranks


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
        with torch.no_grad():
            self.projection.weight.copy_(torch.eye(width_teacher, width))
            self.projection.bias.zero_()

    @torch.no_grad()
    def shrink(self, open_: Tensor) -> None:
        """Keep the inputs ``open_`` (bool [student width]) of the projection, those that the student still has."""
        weight, bias = self.projection.weight[:, open_], self.projection.bias
        self.projection = nn.Linear(weight.shape[1], weight.shape[0])
        self.projection.weight, self.projection.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias)

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
        self.chosen = chosen.where(valid, -1)
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
