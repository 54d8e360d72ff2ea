"""Loss functions: task, distillation, consistency, Lagrangian.

They compute in float32, also under autocast (float64 of float64 inputs); a loss is 0-dim where nothing else is said.

Logits [b, tokens, vocabulary] may be chunked (chunked_logits.py), with labels [b, tokens]. :func:`logits_losses`
computes all losses of a training step in one pass over the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.numerics.chunked_logits import ChunkedLogits, Logits, position_losses
from lit_compress.numerics.vectors import match_loss, vectors_loss

LossKind = Literal["classification", "regression", "relevance", "vectors"]
States = Sequence[Tensor]  # hidden states [batch, length, width], of the embeddings first
NUMBERS = ("regression", "relevance")  # one logit per example; two models are compared by its difference


def task_loss(logits: Logits, labels: Tensor, kind: LossKind, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy or the mean squared error, mean over all labels of the batch; for vectors, vectors.py.

    Args:
        logits: [..., classes] for classification, [batch] or [batch, 1] for regression and relevance, [batch, texts,
            width], of length 1, for vectors.
        labels: int [...] (-100 = ignored), or float [batch], of relevances from 0 to 1; for vectors as
            :func:`vectors_loss` has them.
        reduction: ``none`` for the losses of single labels, not of vectors nor of chunked logits.
    """
    if isinstance(logits, ChunkedLogits):
        return logits_losses(logits, labels)["task"]
    logits = _full(logits)
    with _no_autocast(logits):
        if kind == "vectors":
            return vectors_loss(logits, labels)
        if kind == "regression":
            return F.mse_loss(logits.reshape(labels.shape), labels.to(logits.dtype), reduction=reduction)
        if kind == "relevance":
            logits, labels = logits.reshape(labels.shape), labels.to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


def example_losses(logits: Logits, labels: Tensor, kind: LossKind) -> Tensor:
    """Return the cross-entropy or squared error of every example [batch]; vectors have no labels of single examples.

    An example with several labels (words, start and end of an answer) has the mean over them: here all examples have
    the same weight, in :func:`task_loss`, whose arguments these are, all labels. With one label per example the means
    are equal.
    """
    if isinstance(logits, ChunkedLogits):
        losses = token_losses(logits, labels)
    else:
        losses = task_loss(logits, labels, kind, "none").view(len(labels), -1)
    if losses.shape[1] == 1:
        return losses[:, 0]
    counted = (labels != -100).view(len(labels), -1)
    return losses.sum(1) / counted.sum(1).clamp_min(1)


def token_losses(logits: Logits, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every label of ``labels`` [b, tokens], 0 for those that are -100."""
    if isinstance(logits, Tensor):  # of a program, or of a model whose output layer is not known
        logits = ChunkedLogits(logits, lambda chunk: chunk, logits.shape[-1])
    (losses,) = position_losses(lambda x, y: [_cross_entropy(x, y)], [logits], [labels], labels != -100)
    return losses


def token_divergences(student: ChunkedLogits, teacher: ChunkedLogits, counted: Tensor | None) -> Tensor:
    """Return KL(teacher || student) [b, tokens] of every position, 0 if ``counted`` [b, tokens] is False."""
    (losses,) = position_losses(lambda x, y: [_divergence(x, y, 1.0)], [student, teacher], [], counted)
    return losses


def logits_losses(
    logits: Logits,
    labels: Tensor | None,
    kind: LossKind = "classification",
    *,
    teacher: Logits | None = None,
    temperature: float = 2.0,
    counted: Tensor | None = None,
    copies: int = 1,
    consistency: bool = False,
) -> dict[str, Tensor]:
    """Return the losses of a training step by name: ``task``, ``distillation``, ``consistency``.

    They are :func:`task_loss`, :func:`distillation_loss` (with a teacher) and :func:`consistency_loss` (if asked for).

    Args:
        logits: [copies * b, ..., classes], one copy of the batch after the other.
        labels: of the b examples; None: the loss of the task is 0, which chunked logits cannot have.
        teacher: the teacher's logits [b, ..., classes].
        temperature: of both distributions of the distillation.
        counted: bool [b, ...], which distributions are samples; None for all. Of chunked logits those with a label are.
        copies: number of forwards; the losses are means over them, the consistency is between two.
    """
    if not isinstance(logits, ChunkedLogits):
        terms = {"task": logits.new_zeros(())}
        if labels is not None:
            terms["task"] = task_loss(logits, _repeated(labels, copies), kind)
        if teacher is not None:
            assert isinstance(teacher, Tensor)
            chosen = None if counted is None else _repeated(counted, copies)
            terms["distillation"] = distillation_loss(logits, _repeated(teacher, copies), kind, temperature, chosen)
        if consistency:
            first, second = logits.chunk(2)
            terms["consistency"] = consistency_loss(first, second, kind, counted)
        return terms
    assert labels is not None and (teacher is None or isinstance(teacher, ChunkedLogits))
    names = ["task", *(["distillation"] if teacher is not None else []), *(["consistency"] if consistency else [])]
    parts = [*logits.chunk(copies), *([] if teacher is None else [teacher])]

    def of_chunk(*chunk: Tensor) -> list[Tensor]:
        own, labels = chunk[:copies], chunk[-1]
        losses = [torch.stack([_cross_entropy(each, labels) for each in own]).mean(0)]
        if teacher is not None:
            target = chunk[copies].detach()
            distances = torch.stack([_divergence(each, target, temperature) for each in own])
            losses.append(temperature**2 * distances.mean(0))
        return [*losses, _difference(*own)] if consistency else losses

    counted = labels != -100
    total = counted.sum()
    losses = position_losses(of_chunk, parts, [labels], counted)
    return {name: loss.sum() / total for name, loss in zip(names, losses, strict=True)}


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
    if counted is not None:
        student, teacher = student[counted], teacher[counted]
    student, teacher = _full(student), _full(teacher).detach()
    with _no_autocast(student):
        if kind == "vectors":
            return match_loss(student, teacher)
        if kind in NUMBERS:
            return F.mse_loss(student, teacher)
        log_student = F.log_softmax(student / temperature, -1).flatten(0, -2)
        log_teacher = F.log_softmax(teacher / temperature, -1).flatten(0, -2)
        divergence = F.kl_div(log_student, log_teacher, reduction="sum", log_target=True)
        return divergence / (len(log_student) / temperature**2)  # one operator, and one backward


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
    if counted is not None:
        first, second = first[counted], second[counted]
    first, second = _full(first), _full(second)
    with _no_autocast(first):
        if kind == "vectors":
            return (1 - (first * second).sum(-1)).mean()
        if kind in NUMBERS:
            return F.mse_loss(first, second)
        return _difference(first, second).mean()


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
