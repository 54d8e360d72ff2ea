"""Scores of weights and rows, by which pruning ranks them; larger = keep.

Scores are float32 whatever the dtype of the weights: 2000 additions of 1e-3 give 0.5 in bfloat16.
Everything is element-wise on local shards, so it serves single devices, DDP and FSDP2 alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_compress.numerics.foreach import joined, together
from lit_compress.utils.sharding import local


@torch.no_grad()
def accumulate_first_order_(
    scores: Sequence[Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:  # fmt: skip
    """Add one step's first-order term |g * W| to the float32 ``scores``, in place (UP_first, LPAF Eq. 4).

    Weights must be the forward pass's, gradients finite, accumulated, reduced, unscaled, not clipped. Without a
    gradient a tensor keeps its score.
    """
    for some, terms in _sensitivities(scores, weights, grads):
        torch._foreach_add_(some, terms)


def _sensitivities(
    targets: Sequence[Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield parts of ``targets`` with their |g W|, float32."""
    assert len(targets) == len(weights) == len(grads)
    shards = [local(target) for target in targets]
    for part in together(shards):
        slopes = [
            torch.zeros_like(shard) if grad is None else local(grad).float()
            for shard, grad in zip(shards[part], grads[part], strict=True)
        ]
        terms = torch._foreach_mul(slopes, [local(weight) for weight in weights[part]])
        torch._foreach_abs_(terms)
        yield shards[part], list(terms)


@torch.no_grad()
def accumulate_sensitivity_(
    means: Sequence[Tensor], steps: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:  # fmt: skip
    """Add one step's sensitivity |g * W| to its mean over a window of steps, in place (PLATON's I).

    Args:
        means: float32, the shapes of ``weights``; changed in place.
        steps: int64 [1], number of steps in the means so far; changed in place.
        weights: any float dtype.
        grads: finite, same shapes; a tensor whose gradient is None has sensitivity 0.
    """
    steps += 1
    share = (1 / steps).squeeze(0)  # of this step in the mean
    for averages, terms in _sensitivities(means, weights, grads):
        torch._foreach_sub_(terms, averages)
        torch._foreach_mul_(terms, share)
        torch._foreach_add_(averages, terms)


@torch.no_grad()
def fold_sensitivity_(
    averages: Sequence[Tensor],
    uncertainties: Sequence[Tensor],
    means: Sequence[Tensor],
    steps: Tensor,
    beta1: float,
    beta2: float,
) -> list[Tensor]:
    """End a window: update both moving averages with its mean, and begin the next, in place; return scores (PLATON).

    In this order: Ibar = beta1 Ibar + (1 - beta1) I, then U = |I - Ibar| with the new Ibar, then
    Ubar = beta2 Ubar + (1 - beta2) U. A window without a step changes nothing. The scores are Ibar * Ubar:
    local shards, never negative.

    Args:
        averages: Ibar, float32.
        uncertainties: Ubar, same shapes.
        means: I, the mean over the window, of :func:`accumulate_sensitivity_`; set to 0.
        steps: int64 [1], number of steps in the means; set to 0.
        beta1: weight of the old value in Ibar, in [0, 1).
        beta2: weight of the old value in Ubar, in [0, 1).
    """
    seen = (steps > 0).float()
    for average, mean in zip(averages, means, strict=True):
        local(average).lerp_(local(mean), (1 - beta1) * seen)
    for average, uncertainty, mean in zip(averages, uncertainties, means, strict=True):
        local(uncertainty).lerp_((local(mean) - local(average)).abs_(), (1 - beta2) * seen)
    for mean in means:
        local(mean).zero_()
    steps.zero_()
    return [local(i) * local(u) for i, u in zip(averages, uncertainties, strict=True)]


@torch.no_grad()
def row_importance(scores: Tensor, weight: Tensor) -> Tensor:
    """Return the importance [out], float64, of every row of W for LPAF's weighted SVD (Eqs. 7-9; S_hat without scalar).

    It is the sum of max(S_ij, 0) over the weights that are not 0: never negative, so that Eq. 7 stays well posed.
    """
    assert scores.shape == weight.shape and weight.ndim == 2
    return ((weight != 0).double() * scores.double().clamp_min(0)).sum(1)


@torch.no_grad()
def row_sensitivity(weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return of every output row the mean over its inputs of |w dL/dw|, float32 [local rows] (LoSparse Eqs. 2, 4).

    The mean commutes with the moving average of Eq. 3, so one number per row is enough. FSDP2 shards by rows, so every
    row is complete on one rank. Gradients are finite, accumulated, reduced and unscaled; None counts as zero.
    """
    averages = [torch.zeros_like(local(weight)[:, 0], dtype=torch.float32) for weight in weights]
    known = [i for i, grad in enumerate(grads) if grad is not None]
    slopes = [local(grad).float() for grad in grads if grad is not None]
    for part in together(slopes):
        terms = torch._foreach_mul(slopes[part], [local(weights[i]) for i in known[part]])
        torch._foreach_abs_(terms)
        for width in dict.fromkeys(term.shape[1] for term in terms):  # matrices of one width in one call
            same = [(i, term) for i, term in zip(known[part], terms, strict=True) if term.shape[1] == width]
            rows = joined([term for _, term in same]).view(-1, width)
            means = rows.mean(1).split([len(term) for _, term in same])
            for (i, _), mean in zip(same, means, strict=True):
                averages[i] = mean
    return averages


@torch.no_grad()
def update_row_average_(
    averages: Sequence[Tensor], windows: Sequence[Tensor], terms: Sequence[Tensor], step: int, beta: float,
    interval: int,
) -> None:  # fmt: skip
    """Update the moving averages with one step's row sensitivities, in place (LoSparse Eq. 3, by windows).

    With l = step mod interval the window holds the mean of the last l terms. At l = 0 the finished window enters the
    average, average = beta * average + (1 - beta) * window, and a new one begins with this term. ``interval`` 1 is Eq.
    3 with one step of delay.

    Args:
        averages: float32 [rows] per weight, zero before the first step.
        windows: means of the current window, shaped as ``averages``.
        terms: sensitivities of this step, from :func:`row_sensitivity`.
        step: number of optimizer steps completed before this one.
        beta: weight of the old value, in [0, 1).
        interval: number of steps in a window.
    """
    here, place = [local(window) for window in windows], step % interval
    sizes = [len(window) for window in here]
    term, window = joined(terms), joined(here)  # one number per row: a copy is small
    if place == 0:
        average = joined([local(average) for average in averages]).lerp(window, 1 - beta)
        torch._foreach_copy_([local(average) for average in averages], average.split(sizes))
    mean = term if place == 0 else window.lerp(term, 1 / (place + 1))
    torch._foreach_copy_(here, mean.split(sizes))
