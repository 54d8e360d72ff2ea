"""The shared losses against loops over probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from largest import largest_tensor
from moments import draw
from torch import Tensor

from lit_compress.numerics import losses
from lit_compress.numerics.losses import (
    consistency_loss,
    distillation_loss,
    example_losses,
    lagrangian,
    layer_distillation_loss,
    logits_losses,
    matched_layers_loss,
    state_moments,
    task_loss,
)


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    exps = [math.exp(value / temperature) for value in row]
    return [value / sum(exps) for value in exps]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_losses_of_a_task_and_of_its_examples() -> None:
    """-log p[label], or the squared error, of every example, and their mean over the batch."""
    logits, labels = draw(5, 3), torch.tensor([0, 2, 1, 1, 0])
    expected = [-math.log(softmax(row)[y]) for row, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    assert example_losses(logits, labels, "classification").tolist() == pytest.approx(expected)
    assert task_loss(logits, labels, "classification").item() == pytest.approx(sum(expected) / 5)
    scores, targets = draw(5), draw(5, seed=1)
    expected = [(a - b) ** 2 for a, b in zip(scores.tolist(), targets.tolist(), strict=True)]
    for found in (scores, scores[:, None]):
        assert example_losses(found, targets, "regression").tolist() == pytest.approx(expected)
        assert task_loss(found, targets, "regression").item() == pytest.approx(sum(expected) / 5)
    assert task_loss(scores[:1, None], targets[:1], "regression").shape == ()
    assert example_losses(scores[:1, None], targets[:1], "regression").shape == (1,)
    labels[1] = -100
    kept = torch.tensor([0, 2, 3, 4])
    assert task_loss(logits, labels, "classification") == task_loss(logits[kept], labels[kept], "classification")


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_distillation_is_the_loop(temperature: float) -> None:
    """Invariant 38: T^2 KL(teacher || student), batch mean; the direction matters."""
    student, teacher = draw(4, 3, seed=1).requires_grad_(), draw(4, 3, seed=2).requires_grad_()
    expected = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        expected += temperature**2 * kl(softmax(t, temperature), softmax(s, temperature)) / 4
    loss = distillation_loss(student, teacher, "classification", temperature)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert student.grad is not None and student.grad.any() and teacher.grad is None
    tokens = distillation_loss(student.view(2, 2, 3), teacher.view(2, 2, 3), "classification", temperature)
    assert tokens.item() == pytest.approx(expected)
    regression = distillation_loss(student, teacher, "regression", temperature)
    assert regression.item() == pytest.approx(((student - teacher) ** 2).mean().item())


def test_consistency_is_the_loop() -> None:
    """Invariant 31: half of both KL, batch mean; exactly symmetric, 0 for equal passes, a gradient for both."""
    first, second = draw(4, 3, seed=1).requires_grad_(), draw(4, 3, seed=2).requires_grad_()
    expected = 0.0
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        p, q = softmax(a), softmax(b)
        expected += 0.5 * (kl(p, q) + kl(q, p)) / 4
    assert consistency_loss(first, second, "classification").item() == pytest.approx(expected)
    squared = consistency_loss(first, second, "regression").item()
    assert squared == pytest.approx(((first - second) ** 2).mean().item())
    for kind in ("classification", "regression"):
        loss = consistency_loss(first, second, kind)  # type: ignore[arg-type]
        assert loss == consistency_loss(second, first, kind)  # type: ignore[arg-type]
        assert consistency_loss(first, first, kind) == 0  # type: ignore[arg-type]
        assert all(grad.any() for grad in torch.autograd.grad(loss, (first, second)))


def test_masked_logits_stay_finite() -> None:
    """Invariant 31: padded span logits are a large negative finite number."""
    first, second = draw(2, 6, seed=1).float(), draw(2, 6, seed=2).float()
    for logits in (first, second):
        logits[:, 4:] = torch.finfo(torch.float32).min
    first.requires_grad_()
    loss = consistency_loss(first, second, "classification")
    loss = loss + distillation_loss(first, second, "classification")
    loss.backward()
    assert loss.isfinite() and first.grad is not None and first.grad.isfinite().all()
    short = consistency_loss(first[:, :4], second[:, :4], "classification")
    torch.testing.assert_close(consistency_loss(first, second, "classification"), short)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_logits(dtype: torch.dtype, autocast: bool) -> None:
    """House rule 5: losses in float32, under autocast too."""
    first, second = draw(4, 3, seed=1).to(dtype), draw(4, 3, seed=2).to(dtype)
    labels = torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for loss, wide in (
            (task_loss(first, labels, "classification"), task_loss(first.float(), labels, "classification")),
            (task_loss(first[:, 0], labels.to(dtype), "regression"), None),
            (example_losses(first, labels, "classification").mean(), None),
            (example_losses(first[:, 0], labels.to(dtype), "regression").mean(), None),
            (distillation_loss(first, second, "classification"), None),
            (distillation_loss(first, second, "regression"), None),
            (consistency_loss(first, second, "classification"), None),
            (consistency_loss(first, second, "regression"), None),
            (
                layer_distillation_loss([first[None]] * 2, [second[None]] * 2),
                layer_distillation_loss([first[None].float()] * 2, [second[None].float()] * 2),
            ),
        ):
            assert loss.dtype == torch.float32
            assert wide is None or loss == wide


def over_a_vocabulary(copies: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Logits [3 copies, 7, 40] of a model, those of its teacher, labels of which some do not count, and options."""
    ours, theirs = (draw(size, 7, 40, seed=seed).to(dtype) for seed, size in enumerate((3 * copies, 3)))
    labels = torch.randint(40, (3, 7), generator=torch.Generator().manual_seed(5))
    labels[1, 3:] = labels[2, ::2] = -100
    return ours, theirs, labels, {"temperature": 3.0, "copies": copies, "consistency": copies == 2}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_over_a_vocabulary_are_read_in_parts(copies: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Of 6 positions, the last one shorter: the losses are those of all positions, and so are their gradients."""
    ours, theirs, labels, options = over_a_vocabulary(copies, dtype)
    found = []
    for part in (losses.PART_CPU, 6 * 40):
        monkeypatch.setattr(losses, "PART_CPU", part)
        logits = ours.clone().requires_grad_()
        terms = logits_losses(logits, labels, teacher=theirs, counted=labels != -100, **options)
        assert len(terms) == 1 + copies and all(term > 0.01 for term in terms.values())
        (torch.stack(list(terms.values())) * torch.tensor([0.3, 0.7, 2.0][: len(terms)])).sum().backward()
        assert logits.grad is not None and not logits.grad.view(copies, 3, 7, 40)[:, labels == -100].any()
        found.append((torch.stack([*terms.values(), *example_losses(ours[:3], labels, "classification")]), logits.grad))
    assert found[1][0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole)


def test_no_softmax_of_a_vocabulary_is_kept(monkeypatch: Any) -> None:
    """The backward of logits in 16 bits has gradients in 16 bits, and makes nothing else of their size."""
    ours, theirs, labels, _ = over_a_vocabulary(1, torch.bfloat16)
    monkeypatch.setattr(losses, "PART_CPU", 2 * 40)
    kept: set[tuple[int, torch.dtype]] = set()

    def keep(value: Tensor) -> Tensor:
        kept.add((value.numel(), value.dtype))
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        terms = logits_losses(ours.requires_grad_(), labels, teacher=theirs)
    assert {each for each in kept if each[0] > 2 * 40} == {(ours.numel(), torch.bfloat16)}
    with largest_tensor(torch.float32) as largest:
        torch.stack(list(terms.values())).sum().backward()
    assert largest() <= 2 * 40


def test_the_parts_of_a_step_are_the_single_losses() -> None:
    logits, teacher, labels = draw(6, 7, 5), draw(3, 7, 5, seed=1), torch.arange(21).view(3, 7) % 5
    labels[0, 2], counted = -100, draw(3, 7, seed=2) < 0
    found = logits_losses(logits, labels, teacher=teacher, counted=counted, copies=2, consistency=True)
    twice = [torch.cat([each, each]) for each in (labels, teacher, counted)]
    assert torch.equal(found["task"], task_loss(logits, twice[0], "classification"))
    expected = distillation_loss(logits, twice[1], "classification", 2.0, twice[2])
    assert torch.equal(found["distillation"], expected)
    assert torch.equal(found["consistency"], consistency_loss(logits[:3], logits[3:], "classification", counted))


def naive_layers(student: list[Tensor], teacher: list[Tensor], which: list[int], mask: Tensor | None) -> float:
    total = 0.0
    for state, level in zip(student, which, strict=True):
        errors = []
        for b, example in enumerate(state.tolist()):
            for t, token in enumerate(example):
                if mask is None or mask[b, t]:
                    errors += [(x - y) ** 2 for x, y in zip(token, teacher[level][b, t].tolist(), strict=True)]
        total += sum(errors) / len(errors)
    return total


@pytest.mark.parametrize(
    ("depth", "which"),
    [(4, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 1, 3, 4]), (8, [0, 0, 1, 2, 2, 2, 3, 4, 4]), (1, [0, 4])],
)
@pytest.mark.parametrize("masked", [False, True])
def test_layer_distillation_is_the_loop(depth: int, which: list[int], masked: bool) -> None:
    """A sum over levels of means; l L_t / L_s rounded, halves to even; padding in or out."""
    student = [draw(2, 3, 5, seed=n).requires_grad_() for n in range(depth + 1)]
    teacher = [draw(2, 3, 5, seed=50 + n).requires_grad_() for n in range(5)]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]) if masked else None
    found = layer_distillation_loss(student, teacher, mask)
    assert found.item() == pytest.approx(naive_layers(student, teacher, which, mask))
    found.backward()
    assert all(state.grad is not None for state in student) and all(state.grad is None for state in teacher)


def test_lagrangian() -> None:
    """Price and its gradients: what makes the density goes down where it is dear, the multipliers go up."""
    density, linear, quadratic = (torch.tensor([x], requires_grad=True) for x in (0.7, 0.5, 2.0))
    price = lagrangian(density.sum(), 0.4, linear, quadratic)
    gradients = [grad.item() for grad in torch.autograd.grad(price, (density, linear, quadratic))]
    assert price.item() == pytest.approx(0.5 * 0.3 + 2 * 0.09)
    assert gradients == pytest.approx([0.5 + 2 * 2 * 0.3, 0.3, 0.09])
    assert lagrangian(torch.tensor(0.1), 0.4, torch.ones(1), torch.zeros(1)).item() == pytest.approx(-0.3)


def test_layers_are_matched_with_the_nearest_not_below():
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(2, 5, 4, generator=generator) for _ in range(4)]
    student = [teacher[2] + 0.1, teacher[0] + 0.2, teacher[3] - 0.1, teacher[1]]
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    teacher[2][1, 4] = 1e4  # padding has no say
    chosen = []
    for i, state in enumerate(student):
        distances = {j: float(((state - teacher[j])[mask > 0] ** 2).mean()) for j in range(i, 4)}
        chosen.append(min(distances, key=distances.get))
    assert chosen[0] == 2 and chosen[3] == 3
    expected = sum(((s - teacher[j])[mask > 0] ** 2).mean() for s, j in zip(student, chosen, strict=True))
    assert torch.allclose(matched_layers_loss(student, teacher, mask), expected)


def test_relative_layer_loss_does_not_depend_on_the_scale_of_a_net():
    """A loop over layers and tokens; padding counts neither in the errors nor in the variance."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3)] for _ in range(2)
    )
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = 0.0
    for s, t in zip(student, teacher, strict=True):
        expected += naive_layers([s], [t], [0], mask) / float(t[mask.bool()].var(correction=0))
    for scale in (1, 10):
        found = layer_distillation_loss([scale * s for s in student], [scale * t for t in teacher], mask, relative=True)
        assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1], [1, 0, 0]])])
def test_state_moments_are_number_sum_and_sum_of_squares(mask: Tensor | None) -> None:
    state = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = (state if mask is None else state[mask.bool()]).flatten()
    expected = [len(values), sum(values), sum(values**2)]
    assert state_moments(state, mask).tolist() == pytest.approx([float(value) for value in expected])
