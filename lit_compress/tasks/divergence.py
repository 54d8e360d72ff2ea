"""How far a model's answers are from another model's, on one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lit_compress.numerics.chunked_logits import ChunkedLogits, Logits
from lit_compress.numerics.losses import distillation_loss, token_divergences

if TYPE_CHECKING:
    from lit_compress.tasks.base import TaskType


def summed_divergence(kind: TaskType, ours: Logits, theirs: Logits, batch: dict[str, Tensor]) -> float:
    """Return the sum over the examples of KL(theirs || ours), summed over the distributions of an example.

    For regression and vectors, half the squared difference; see
    :func:`~lit_compress.evaluation.divergence.divergence`.

    Args:
        kind: type of the task.
        ours: logits [b, ..., classes] of one model, as :meth:`TaskType.logits` returns them.
        theirs: logits of the other, of the same shape.
        batch: the b examples.
    """
    if isinstance(ours, ChunkedLogits):
        assert isinstance(theirs, ChunkedLogits)
        return float(token_divergences(ours, theirs, kind.counted(batch)).sum())
    assert isinstance(theirs, Tensor)
    if kind.loss != "classification":
        return 0.5 * float((ours.float() - theirs.float()).square().sum())
    counted = kind.counted(batch)
    mean = float(distillation_loss(ours, theirs, kind.loss, temperature=1.0, counted=counted))
    return mean * (theirs[..., 0].numel() if counted is None else int(counted.sum()))
