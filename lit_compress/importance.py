"""Scores: how much a weight matters; larger = keep.

Scores are float32 whatever the dtype of the weights: 2000 additions of 1e-3 give 0.5 in bfloat16.
Everything is element-wise on local shards, so it serves single devices, DDP and FSDP2 alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lit_compress.tensors import local

FirstOrderForm = Literal["absolute", "signed"]
Weighting = Literal["scores", "scores_abs", "scores_raw", "scores_all", "scores_shifted", "mask", "none"]


def magnitude(weight: Tensor) -> Tensor:
    """|W| as float32, same shape (UP_zero: zeroth-order pruning, LPAF Sec. 2.2)."""
    return weight.detach().float().abs()


@torch.no_grad()
def accumulate_first_order_(
    scores: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    form: FirstOrderForm = "absolute",
    reduce: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Add one step's first-order term to the scores, in place (UP_first, LPAF Eq. 4).

    ``signed`` is Eq. 4 as printed, S -= g * W: positive where a step moves W away from zero. ``absolute`` is
    the definition in the paper's LaTeX source, S += |g * W|, and trains more stably.

    If any gradient is inf or NaN (a step that a loss scaler skips), no score changes at all. The decision is
    taken on the device, without waiting for it. Weights must be the ones of the forward pass, gradients
    whole: accumulated, reduced, unscaled, not clipped.

    Args:
        scores: float32, the shapes of ``weights``; changed in place.
        weights: any float dtype.
        grads: same shapes; a tensor whose gradient is None keeps its score.
        form: which of the two terms.
        reduce: in-place all-reduce (SUM) of an int64 tensor [1] over the ranks that hold shards, so that all
            of them skip together. Not needed where every rank has whole gradients (DDP).

    Returns:
        0-dim bool tensor on the scores' device: True if the update was applied.
    """
    assert len(scores) == len(weights) == len(grads)
    assert form in ("absolute", "signed"), form
    here = [
        (local(score), local(weight), local(grad))
        for score, weight, grad in zip(scores, weights, grads, strict=True)
        if grad is not None
    ]
    finite = _all_finite([grad for _, _, grad in here], device=local(scores[0]).device, reduce=reduce)
    for score, weight, grad in here:
        term = torch.mul(grad.float(), weight)  # float32 also where weight is bfloat16
        if form == "absolute":
            term.abs_()
        else:
            term.neg_()
        score.add_(term.masked_fill_(~finite, 0.0))  # selects: 0 * inf would be NaN
    return finite


def _all_finite(grads: Sequence[Tensor], device: torch.device, reduce: Callable[[Tensor], object] | None) -> Tensor:
    """0-dim bool: every element of every tensor (and shard) is finite. One read-only pass, no host sync."""
    # Both ends of the range show an inf or a NaN, and vectorise 20 times better than isfinite().all().
    ends = [end.float() for grad in grads if grad.numel() for end in torch.aminmax(grad)]
    broken = torch.zeros(1, dtype=torch.int64, device=device)
    if ends:
        broken += (~torch.stack(ends).isfinite()).sum()
    if reduce is not None:
        reduce(broken)
    return (broken == 0).squeeze(0)


@torch.no_grad()
def row_importance(
    scores: Tensor, weight: Tensor, weighting: Weighting = "scores", threshold: Tensor | float = 0.0
) -> Tensor:
    """One importance per output row of W, for the weighted SVD of LPAF (Eqs. 7-9; S_hat without its scalar).

    With M = [W != 0]:

    - ``scores``: sum_j M_ij max(S_ij, 0), never negative, so that Eq. 7 stays well posed
    - ``scores_abs``: sum_j |S_ij|
    - ``scores_raw``: sum_j S_ij, the paper to the letter; can be negative
    - ``scores_all``: sum_j max(S_ij, 0), pruned weights included
    - ``scores_shifted``: sum_j M_ij (S_ij - min(threshold, 0))
    - ``mask``: sum_j M_ij (Table 5, "w/ M")
    - ``none``: 1, the plain SVD

    Args:
        scores: [out, in], whole (not a shard).
        weight: [out, in], pruned entries exactly 0.
        weighting: one of the above.
        threshold: last pruning threshold; used by ``scores_shifted`` only.

    Returns:
        float64 [out].
    """
    assert scores.shape == weight.shape and weight.ndim == 2
    scores, mask = scores.double(), (weight != 0).double()
    match weighting:
        case "scores":
            return (mask * scores.clamp_min(0)).sum(1)
        case "scores_abs":
            return scores.abs().sum(1)
        case "scores_raw":
            return scores.sum(1)
        case "scores_all":
            return scores.clamp_min(0).sum(1)
        case "scores_shifted":
            floor = torch.as_tensor(threshold, dtype=torch.float64, device=scores.device).clamp_max(0)
            return (mask * (scores - floor)).sum(1)
        case "mask":
            return mask.sum(1)
        case "none":
            return torch.ones_like(scores[:, 0])
    raise AssertionError(weighting)
