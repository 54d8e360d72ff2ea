"""Gradients of the loss for some matrices on a few examples, and the squares of every example's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_compress.calibration.fisher import _frozen, _rows
from lit_compress.numerics.losses import example_losses
from lit_compress.tasks import TaskType, task_type
from lit_compress.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MeanGradient:
    """Of one matrix, in the net's dtype, on the CPU.

    Attributes:
        mean: [out, in], mean over the examples of their gradients.
        squares: [out, in], mean of the squares; None unless they were asked for.
    """

    mean: Tensor
    squares: Tensor | None


def mean_gradients(
    net: PreTrainedModel,
    batches: Iterable[dict[str, Tensor]],
    kind: TaskType | str,
    sites: Sequence[str],
    *,
    squares: bool = False,
    reduce: Callable[[Tensor], object] | None = None,
) -> dict[str, MeanGradient]:
    """Return {site: mean gradient of its matrix} of the loss on the examples of ``batches``, one backward for each.

    The net runs on its device, in evaluation mode; afterwards it is as it was. The sums take as much memory as the
    matrices, and with ``squares`` twice that.

    Args:
        net: with its task's head.
        batches: with labels and ``index``; rows whose index is -1 are left out.
        kind: of the task; or its name, for the usual one.
        sites: names of Linears.
        squares: whether to return them, too.
        reduce: in-place all-reduce (SUM) over ranks with other examples.

    Raises:
        UserError: a batch has no labels, there are no examples, or a gradient is inf or NaN.
    """
    weights = [net.get_parameter(f"{name}.weight") for name in sites]
    sums, seconds = ([torch.zeros_like(w) for w in weights] if wanted else [] for wanted in (True, squares))
    count = torch.zeros(1, dtype=torch.int64, device=net.device)
    task = task_type(kind)
    with _frozen(net), torch.enable_grad(), torch.autocast(net.device.type, enabled=False):
        for weight in weights:
            weight.requires_grad_(True)
        for batch in batches:
            rows = _rows(batch, net.device, drawn=False)
            for i in range(len(rows["labels"])):
                row = {name: column[i : i + 1] for name, column in rows.items()}
                logits = task.logits(task.run(net, row), row)
                loss = example_losses(logits, row["labels"], task.loss).sum()
                found = torch.autograd.grad(loss, weights, allow_unused=True)
                count += 1
                for j, gradient in enumerate(found):
                    if gradient is not None:
                        sums[j] += gradient
                        if squares:
                            seconds[j] += gradient.square()
    for total in (count, *sums, *seconds) if reduce is not None else ():
        reduce(total)  # type: ignore[misc]
    if not count:
        raise UserError("calibration: there are no examples; give at least 1")
    return {
        name: mean_gradient(name, sums[i], seconds[i] if squares else None, float(count))
        for i, name in enumerate(sites)
    }


def mean_gradient(name: str, total: Tensor, squares: Tensor | None, count: float) -> MeanGradient:
    """Return the means of sums over ``count`` examples of the matrix ``name``.

    Raises:
        UserError: a gradient is inf or NaN.
    """
    mean, second = (None if each is None else (each.detach() / count).cpu() for each in (total, squares))
    assert mean is not None
    if not mean.isfinite().all():
        raise UserError(f"calibration: gradients at '{name}' are inf or NaN; give a net with a finite loss")
    return MeanGradient(mean, second)
