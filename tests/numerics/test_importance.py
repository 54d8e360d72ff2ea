"""Scores against naive loops, and what they are meant to say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lit_compress.numerics.importance import (
    accumulate_first_order_,
    accumulate_sensitivity_,
    fold_sensitivity_,
    row_importance,
    row_sensitivity,
    update_row_average_,
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def history(steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two weights and their gradients in every step."""
    weights = [draw(3, 4, seed=1), draw(2, 5, seed=2)]
    return weights, [[draw(*w.shape, seed=10 + 5 * t + n) for n, w in enumerate(weights)] for t in range(steps)]


def test_scores_of_plain_sgd_by_hand() -> None:
    """Invariant 21: S after n steps is the sum over steps of |g W|."""
    weights, steps = history(4)
    scores, expected = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for grads in steps:
        for weight, grad, table in zip(weights, grads, expected, strict=True):
            for place in itertools.product(*map(range, weight.shape)):
                table[place] += abs(float(grad[place]) * float(weight[place]))
        accumulate_first_order_(scores, weights, grads)
        for weight, grad in zip(weights, grads, strict=True):
            weight -= 0.1 * grad
    for score, table in zip(scores, expected, strict=True):
        torch.testing.assert_close(score, table, rtol=1e-5, atol=1e-6)


def test_missing_gradients_and_half_precision() -> None:
    """Invariant 22: float32 scores for bfloat16 weights do not stall; grad None keeps its score."""
    weight = torch.full((2, 2), 1e-3, dtype=torch.bfloat16)
    grad = torch.full((2, 2), 1.0078125, dtype=torch.bfloat16)  # the product needs more than 8 bits
    scores = [torch.zeros(2, 2), torch.full((3,), 5.0)]
    for _ in range(2000):
        accumulate_first_order_(scores, [weight, torch.ones(3)], [grad, None])
    assert scores[0].dtype == torch.float32
    torch.testing.assert_close(
        scores[0], torch.full((2, 2), 2000 * float(weight[0, 0]) * float(grad[0, 0])), rtol=1e-4, atol=0
    )
    assert scores[1].tolist() == [5.0] * 3


def test_row_importance_is_the_loop() -> None:
    """LPAF Eqs. 7-9: positive scores of the weights that are left."""
    scores, weight = draw(6, 4, seed=1), draw(6, 4, seed=2)
    weight[scores < -0.4] = 0.0
    weight[3] = 0.0
    result = row_importance(scores, weight)
    assert result.dtype == torch.float64 and result.shape == (6,)
    for total, row, values in zip(result.tolist(), scores.tolist(), weight.tolist(), strict=True):
        expected = sum(max(score, 0.0) for score, value in zip(row, values, strict=True) if value != 0)
        assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_row_sensitivity_by_hand() -> None:
    """LoSparse Eqs. 2 and 4: the mean of |w g| over a row, float32 whatever the weights are."""
    weights, (grads,) = history(1)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = [w.to(dtype) for w in weights]
        terms = row_sensitivity(narrow, [g.to(dtype) for g in grads])
        assert all(term.dtype == torch.float32 for term in terms)
        for term, weight, grad in zip(terms, narrow, [g.to(dtype) for g in grads], strict=True):
            for i in range(len(weight)):
                entries = [abs(float(w) * float(g)) for w, g in zip(weight[i], grad[i], strict=True)]
                assert float(term[i]) == pytest.approx(sum(entries) / len(entries), rel=1e-5)
    assert torch.equal(row_sensitivity(weights, [None, grads[1]])[0], torch.zeros(3))


@pytest.mark.parametrize("interval", [1, 3, 4])
def test_row_average_is_the_mean_of_the_elementwise_one(interval: int) -> None:
    """LoSparse Eq. 3 in windows, kept per entry in float64, then averaged over the row."""
    weights, grads = history(11)
    averages, windows = ([torch.zeros(len(w)) for w in weights] for _ in range(2))
    entry = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    parts: list[list[Tensor]] = [[torch.zeros_like(e)] for e in entry]
    for step, step_grads in enumerate(grads):
        update_row_average_(averages, windows, row_sensitivity(weights, step_grads), step, 0.85, interval)
        for n, (weight, grad) in enumerate(zip(weights, step_grads, strict=True)):
            if step % interval == 0:
                entry[n] = 0.85 * entry[n] + 0.15 * torch.stack(parts[n]).mean(0)
                parts[n] = []
            parts[n].append((weight.double() * grad.double()).abs())
            torch.testing.assert_close(averages[n], entry[n].mean(1).float(), rtol=1e-5, atol=1e-8)


class Sensitivity:
    """PLATON's state over some tensors, driven step by step."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], beta1: float, beta2: float) -> None:
        self.mean, self.average, self.uncertainty = ([torch.zeros(size) for size in sizes] for _ in range(3))
        self.steps = torch.zeros(1, dtype=torch.int64)
        self.betas = (beta1, beta2)

    def add(self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        accumulate_sensitivity_(self.mean, self.steps, weights, grads)

    def fold(self) -> list[Tensor]:
        return fold_sensitivity_(self.average, self.uncertainty, self.mean, self.steps, *self.betas)


@pytest.mark.parametrize("beta2", [0.95, 0.0])
@pytest.mark.parametrize("window", [1, 3])
def test_sensitivity_is_the_loop(window: int, beta2: float) -> None:
    """Spec 2.2: window mean, Ibar before Ubar, score = Ibar Ubar; never negative."""
    shapes = [(2, 3), (4, 2)]
    state = Sensitivity(shapes, 0.85, beta2)
    tables = [[[0.0, 0.0, 0.0] for _ in range(r * c)] for r, c in shapes]  # I, Ibar, Ubar of every entry
    for step in range(9):
        weights = [draw(*shape, seed=100 + 7 * step + n) for n, shape in enumerate(shapes)]
        grads = [draw(*shape, seed=500 + 7 * step + n) for n, shape in enumerate(shapes)]
        state.add(weights, grads)
        for table, weight, grad in zip(tables, weights, grads, strict=True):
            for entry, w, g in zip(table, weight.flatten().tolist(), grad.flatten().tolist(), strict=True):
                entry[0] += abs(w * g) / window
        if (step + 1) % window == 0:
            scores = state.fold()
            for table, score in zip(tables, scores, strict=True):
                for entry, found in zip(table, score.flatten().tolist(), strict=True):
                    entry[1] = 0.85 * entry[1] + 0.15 * entry[0]
                    entry[2] = beta2 * entry[2] + (1 - beta2) * abs(entry[0] - entry[1])
                    entry[0] = 0.0
                    assert found == pytest.approx(entry[1] * entry[2], rel=1e-5, abs=1e-9)
                    assert found >= 0


def test_a_window_without_a_step_changes_nothing() -> None:
    state = Sensitivity([(2, 2)], 0.85, 0.9)
    state.add([draw(2, 2, seed=1)], [draw(2, 2, seed=2)])
    before = state.fold()
    assert torch.equal(state.fold()[0], before[0]) and state.steps == 0


def test_sensitivity_of_half_precision_and_missing_gradients() -> None:
    """float32 products of bfloat16 weights; no gradient counts as sensitivity 0."""
    state = Sensitivity([(1,), (1,)], 0.0, 0.5)
    weight, grad = torch.tensor([1.0078125]).bfloat16(), torch.tensor([1.0078125]).bfloat16()
    state.add([weight, torch.ones(1)], [grad, torch.ones(1)])
    state.add([weight, torch.ones(1)], [grad, None])
    assert state.mean[0].dtype == torch.float32 and state.mean[0].item() == 1.0078125**2
    assert state.mean[1].item() == 0.5
