"""Loss functions: task, distillation, consistency, Lagrangian.

They compute in float32, also under autocast (float64 of float64 inputs); a loss is 0-dim where nothing else is said.
Of logits over a vocabulary the float32 values and softmaxes exist for a part of the positions at a time, see
:func:`in_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.numerics.vectors import match_loss, vectors_loss

LossKind = Literal["classification", "regression", "relevance", "vectors"]
States = Sequence[Tensor]  # hidden states [batch, length, width], of the embeddings first
NUMBERS = ("regression", "relevance")  # one logit per example; two models are compared by its difference
PART, PART_CPU = 1 << 24, 1 << 20  # most logits of a part; on a CPU, about those that fit a core's cache


def task_loss(logits: Tensor, labels: Tensor, kind: LossKind, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy or the mean squared error, mean over all labels of the batch; for vectors, vectors.py.

    Args:
        logits: [..., classes] for classification, [batch] or [batch, 1] for regression and relevance, [batch, texts,
            width], of length 1, for vectors.
        labels: int [...] (-100 = ignored), or float [batch], of relevances from 0 to 1; for vectors as
            :func:`vectors_loss` has them.
        reduction: ``none`` for the losses of single labels, [labels], not of vectors.
    """
    if kind == "classification":
        losses = in_parts(_cross_entropy, logits.flatten(0, -2), labels.flatten())
        return losses if reduction == "none" else losses.sum() / (labels != -100).sum()
    logits = _full(logits)
    with _no_autocast(logits):
        if kind == "vectors":
            return vectors_loss(logits, labels)
        if kind == "regression":
            return F.mse_loss(logits.reshape(labels.shape), labels.to(logits.dtype), reduction=reduction)
        logits, labels = logits.reshape(labels.shape), labels.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)


def example_losses(logits: Tensor, labels: Tensor, kind: LossKind) -> Tensor:
    """Return the cross-entropy or squared error of every example [batch]; vectors have no labels of single examples.

    An example with several labels (words, start and end of an answer) has the mean over them: here all examples have
    the same weight, in :func:`task_loss`, whose arguments these are, all labels. With one label per example the means
    are equal.
    """
    losses = task_loss(logits, labels, kind, "none").view(len(labels), -1)
    if losses.shape[1] == 1:
        return losses[:, 0]
    counted = (labels != -100).view(len(labels), -1)
    return losses.sum(1) / counted.sum(1).clamp_min(1)


def logits_losses(
    logits: Tensor,
    labels: Tensor | None,
    kind: LossKind = "classification",
    *,
    teacher: Tensor | None = None,
    temperature: float = 2.0,
    counted: Tensor | None = None,
    copies: int = 1,
    consistency: bool = False,
) -> dict[str, Tensor]:
    """Return the losses of a training step by name: ``task``, ``distillation``, ``consistency``.

    They are :func:`task_loss`, :func:`distillation_loss` (with a teacher) and :func:`consistency_loss` (if asked for).

    Args:
        logits: [copies * b, ..., classes], one copy of the batch after the other.
        labels: of the b examples; None: the loss of the task is 0.
        teacher: the teacher's logits [b, ..., classes].
        temperature: of both distributions of the distillation.
        counted: bool [b, ...], which distributions are samples; None for all.
        copies: number of forwards; the losses are means over them, the consistency is between two.
    """
    terms = {"task": logits.new_zeros(())}
    if labels is not None:
        terms["task"] = task_loss(logits, _repeated(labels, copies), kind)
    if teacher is not None:
        chosen = None if counted is None else _repeated(counted, copies)
        terms["distillation"] = distillation_loss(logits, _repeated(teacher, copies), kind, temperature, chosen)
    if consistency:
        first, second = logits.chunk(2)
        terms["consistency"] = consistency_loss(first, second, kind, counted)
    return terms


def in_parts(losses: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """Return the losses [n] of positions with ``logits`` [n, classes], computed in float32 without autocast.

    More than :data:`PART` logits are divided. Each part is computed again in the backward, so that no softmax of all
    positions is kept, and gradients alone have the size of the logits.

    Args:
        losses: function from ``logits`` and ``others`` of some positions to their losses.
        others: each [n, ...]: further logits, labels.
    """
    size = (PART_CPU if logits.device.type == "cpu" else PART) // logits.shape[-1]
    if len(logits) <= size:
        return _apart(losses, (logits, *others))
    found: Tensor = _InParts.apply(losses, max(1, size), logits, *others)  # type: ignore[assignment]
    return found


class _InParts(torch.autograd.Function):
    """Losses of parts of ``size`` positions, computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, losses: Callable[..., Tensor], size: int, *inputs: Tensor) -> Tensor:
        ctx.losses, ctx.size = losses, size
        ctx.save_for_backward(*inputs)
        return torch.cat([_apart(losses, part) for part in zip(*(each.split(size) for each in inputs), strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        totals = [torch.empty_like(each) if wants else None for each, wants in zip(inputs, wanted, strict=True)]
        for start in range(0, len(gradient), ctx.size):
            place = slice(start, start + ctx.size)
            part = [each[place].detach().requires_grad_(wants) for each, wants in zip(inputs, wanted, strict=True)]
            with torch.enable_grad():
                losses = _apart(ctx.losses, part)
            losses.backward(gradient[place])
            for total, each in zip(totals, part, strict=True):
                if total is not None:
                    total[place] = each.grad
        return None, None, *totals


def _apart(losses: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Return the losses of ``inputs``, whose logits come first and are at least of float32 there."""
    with _no_autocast(inputs[0]):
        return losses(*(_full(each) if each.is_floating_point() else each for each in inputs))


def _repeated(batch: Tensor, copies: int) -> Tensor:
    return batch if copies == 1 else torch.cat([batch] * copies)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) [n] of logits [n, classes]."""
    log_student, log_teacher = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)


def _difference(first: Tensor, second: Tensor) -> Tensor:
    """Return (KL(p1 || p2) + KL(p2 || p1)) / 2 [...] of logits [..., classes]."""
    log_first, log_second = F.log_softmax(first, -1), F.log_softmax(second, -1)
    return 0.5 * ((log_first.exp() - log_second.exp()) * (log_first - log_second)).sum(-1)


def distillation_loss(
    student: Tensor, teacher: Tensor, kind: LossKind, temperature: float = 2.0, counted: Tensor | None = None
) -> Tensor:
    """Return the distance between the logits of student and teacher; no gradient reaches the teacher.

    Classification: temperature^2 * KL(softmax(teacher / temperature) || softmax(student / temperature)), mean over the
    samples (the form of CoFi and nn_pruning, temperature 2; Hinton et al. 2015, Sec. 2). Regression and relevance: mean
    squared error. Vectors: :func:`match_loss`, cosines to the teacher's and among themselves.

    Args:
        student: [..., classes]; for regression, any shape; for vectors [..., width], of length 1.
        teacher: same shape.
        temperature: above 0; only for classification.
        counted: bool [...], which distributions are samples; None for all.
    """
    if kind == "classification" and (counted is not None or student.numel() > PART_CPU):
        of_parts = partial(_divergence, temperature=temperature)
        return temperature**2 * _mean_of(of_parts, student, teacher.detach(), counted)
    student, teacher = _full(student), _full(teacher).detach()
    with _no_autocast(student):
        if kind == "vectors":
            return match_loss(student, teacher)
        if kind in NUMBERS:
            return F.mse_loss(student, teacher)
        ours, theirs = (F.log_softmax(logits / temperature, -1).flatten(0, -2) for logits in (student, teacher))
        divergence = F.kl_div(ours, theirs, reduction="sum", log_target=True)
        return divergence / (len(ours) / temperature**2)  # one operator, and one backward


def _mean_of(losses: Callable[..., Tensor], first: Tensor, second: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean of the losses of two models' logits [..., classes] where ``counted`` [...] is True."""
    found = in_parts(losses, first.flatten(0, -2), second.flatten(0, -2))
    return found.mean() if counted is None else found.where(counted.flatten(), 0.0).sum() / counted.sum()


def layer_distillation_loss(
    student: States, teacher: States, mask: Tensor | None = None, relative: bool | States = False
) -> Tensor:
    """Return the distance between the hidden states of student and teacher; no gradient reaches the teacher.

    sum over l = 0..L of MSE(student_l, teacher_l), the mean over batch, positions and width (Li et al. 2023, LoSparse,
    App. E; l = 0 is the embedding output). With different depths L_s, L_t, student_l is compared with teacher_m, m = l
    L_t / L_s rounded, halves to even.

    Args:
        student: L_s + 1 tensors [batch, length, width].
        teacher: L_t + 1 of them.
        mask: [batch, length], not 0 at real tokens; the mean is over those. None: padding is compared too.
        relative: divide every term by the variance of the teacher's state, over all components at the compared
            positions. So the loss does not change when teacher and student are scaled alike. Or these variances,
            L_t + 1, of a larger batch with this one in it.
    """
    depth, depth_teacher = len(student) - 1, len(teacher) - 1
    total = torch.zeros((), device=student[0].device)
    with _no_autocast(student[0]):
        weights = None if mask is None else _weights(mask, student[0])
        for level, state in enumerate(student):
            matched = round(level * depth_teacher / depth)
            target = _full(teacher[matched]).detach()
            assert state.shape == target.shape, (state.shape, target.shape)
            distance = _mean_square(_full(state) - target, weights)
            if relative is not False:
                own = _mean_square(target - _mean(target, weights), weights) if relative is True else relative[matched]
                distance = distance / own.clamp_min(1e-12)
            total = total + distance
    return total


def state_moments(state: Tensor, mask: Tensor | None) -> Tensor:
    """Return number, sum and sum of squares, [3], of ``state`` [batch, length, width] where ``mask`` is not 0.

    The square of the mean and the variance are summed apart, so that little is lost to rounding. Moments of several
    batches may be added.
    """
    state = _full(state)
    weights = None if mask is None else _weights(mask, state)
    rows = state.new_tensor(float(state[..., 0].numel())) if mask is None else (mask != 0).sum()
    number = (rows * state.shape[-1]).to(state.dtype)
    mean = _mean(state, weights)
    return number * torch.stack([torch.ones_like(mean), mean, _mean_square(state - mean, weights) + mean.square()])


def matched_layers_loss(
    student: States,
    teacher: States,
    mask: Tensor | None,
    reduce: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return the distance of hidden states from the nearest teacher states at or above their layer.

    sum over i of MSE(student_i, teacher_m(i)), m(i) = argmin over j >= i, chosen in every batch (the layer distillation
    of SP3's program). No gradient reaches the teacher.

    Args:
        student: at most L + 1 hidden states [batch, length, width].
        teacher: L + 1 of them.
        mask: [batch, length], not 0 at real tokens; None: padding is compared too.
        reduce: in-place all-reduce (SUM) over ranks with other examples, so that all compare the same layers.
    """
    with torch.no_grad(), _no_autocast(student[0]):  # chosen on the device: the host does not wait for the numbers
        real = 1.0 if mask is None else (mask != 0)[..., None].float()
        rows, columns = (torch.stack([(h.float() * real).flatten() for h in hs]) for hs in (student, teacher))
        distance = rows.square().sum(1)[:, None] + columns.square().sum(1) - 2 * rows @ columns.T
        if reduce is not None:
            reduce(distance)
        later = torch.ones_like(distance).triu()
        matched = torch.stack(list(teacher))[torch.where(later > 0, distance, torch.inf).argmin(1)]
    return layer_distillation_loss(student, matched.unbind(), mask)


def consistency_loss(first: Tensor, second: Tensor, kind: LossKind, counted: Tensor | None = None) -> Tensor:
    """Return the distance between the logits of two forwards of one batch (LPAF Sec. 4.3, L_c; the form of R-Drop).

    Classification: (KL(p1 || p2) + KL(p2 || p1)) / 2, mean over the samples, written as sum (p1 - p2)(log p1 - log p2)
    / 2: exactly symmetric, exactly 0 for equal logits, never negative. Regression and relevance: mean squared error.
    Vectors, of length 1: 1 - cosine. Gradients flow into both passes. Arguments as in :func:`distillation_loss`.
    """
    if kind == "classification":
        return _mean_of(_difference, first, second, counted)
    first, second = _full(first), _full(second)
    with _no_autocast(first):
        return (1 - (first * second).sum(-1)).mean() if kind == "vectors" else F.mse_loss(first, second)


def lagrangian(density: Tensor, target: float, linear: Tensor, quadratic: Tensor) -> Tensor:
    """Return the Lagrangian of the density, linear (s - t) + quadratic (s - t)^2 (CoFi; SP3 Eq. 5).

    It is minimised over the gates and maximised over both multipliers. CoFi writes it with sparsities, which only turns
    the sign of ``linear``.

    Args:
        density: s, the expected density, 0-dim.
        target: t, the target at this step.
        linear: multiplier [1], of either sign.
        quadratic: multiplier [1]; its gradient is a square, so it never falls from its start at 0.
    """
    with _no_autocast(density):
        gap = density.float() - target
        return (linear * gap + quadratic * gap.square()).sum()


def _weights(mask: Tensor, state: Tensor) -> Tensor:
    """Return the weight of every position in a mean over those that are not 0 in ``mask`` [batch, length]."""
    real = (mask != 0).to(_full(state).dtype)
    return real / real.sum()


def _mean(state: Tensor, weights: Tensor | None) -> Tensor:
    return state.mean() if weights is None else (state.mean(-1) * weights).sum()


def _mean_square(error: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean square of ``error`` [batch, length, width]; to gather a mask's rows the host would wait."""
    return error.square().mean() if weights is None else (error.square().mean(-1) * weights).sum()


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _no_autocast(logits: Tensor) -> torch.autocast:
    return torch.autocast(logits.device.type, enabled=False)
