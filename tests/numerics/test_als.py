"""Alternating least squares against a loop that solves every row on its own."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lit_compress.numerics import als as elementwise
from lit_compress.numerics.als import alternating_least_squares, improve_left, squared_error


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(rank: int = 3, out: int = 7, inside: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return draw(out, inside), draw(out, inside, seed=1).exp(), draw(out, rank, seed=2), draw(rank, inside, seed=3)


def loop_error(weight: Tensor, importance: Tensor, approx: Tensor) -> float:
    total = 0.0
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            total += float(importance[i, j]) * float(weight[i, j] - approx[i, j]) ** 2
    return total


def solved(weight: Tensor, importance: Tensor, right: Tensor) -> Tensor:
    """left, row by row, from the weighted least squares problem itself."""
    rows = []
    for w, i in zip(weight, importance, strict=True):
        root = i.sqrt()
        rows.append(torch.linalg.lstsq((right * root).T, w * root).solution)
    return torch.stack(rows)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_half_a_sweep_solves_every_row(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """As many steps as ranks are the exact solution; the new basis spans what right spanned, and is orthonormal."""
    weight, importance, left, right = problem(rank)
    near = improve_left(weight, importance, left, right)
    torch.testing.assert_close(near[0] @ near[1], solved(weight, importance, right) @ right, rtol=0, atol=1e-5)
    monkeypatch.setattr(elementwise, "RIDGE", 0.0)
    new_left, new_right = improve_left(weight, importance, left, right)
    torch.testing.assert_close(new_left @ new_right, solved(weight, importance, right) @ right)
    gram = new_right @ torch.diag(importance.mean(0)) @ new_right.T
    torch.testing.assert_close(gram, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_ridge_pulls_to_the_old_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row: the minimum of the error plus ridge * mean curvature * |left_o - old left_o|^2."""
    monkeypatch.setattr(elementwise, "RIDGE", 0.5)
    weight, importance, left, right = problem()
    new_left, basis = improve_left(weight, importance, left, right)
    old_left = left @ right @ torch.linalg.pinv(basis)  # in the basis of the result
    for o in range(7):
        normal = basis @ torch.diag(importance[o]) @ basis.T
        ridge = (
            0.5
            * torch.eye(3, dtype=torch.float64)
            * sum(importance[o, j] * basis[:, j] @ basis[:, j] for j in range(9))
            / 3
        )
        wanted = torch.linalg.solve(normal + ridge, basis @ (importance[o] * weight[o]) + ridge @ old_left[o])
        torch.testing.assert_close(new_left[o], wanted)


def test_one_step_is_exact_for_a_rank_one_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the choice of basis is for."""
    monkeypatch.setattr(elementwise, "STEPS", 1)
    weight, _, left, right = problem()
    importance = draw(7, seed=4).exp()[:, None] * draw(9, seed=5).exp()
    new_left, new_right = improve_left(weight, importance, left, right)
    torch.testing.assert_close(new_left @ new_right, solved(weight, importance, right) @ right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_half_sweep_never_loses(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Any number of steps, importances over many decades: every row's own error falls or stays."""
    monkeypatch.setattr(elementwise, "STEPS", steps)
    for seed in range(20):
        weight, importance = draw(12, 20, seed=seed), (5 * draw(12, 20, seed=seed + 50)).exp()
        left, right = draw(12, 10, seed=2), draw(10, 20, seed=3)
        new_left, new_right = improve_left(weight, importance, left, right)
        before = (importance * (weight - left @ right).square()).sum(1)
        after = (importance * (weight - new_left @ new_right).square()).sum(1)
        assert (after <= before * (1 + 1e-9)).all() and after.sum() < 0.9 * before.sum()


def test_error_by_hand() -> None:
    weight, importance, left, right = problem()
    assert squared_error(weight, importance, left, right) == pytest.approx(
        loop_error(weight, importance, left @ right), rel=1e-12
    )


def test_sweeps_lower_the_error_until_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monotone; both factors move; stops at the first sweep that gains less than the tolerance."""
    weight, importance, left, right = problem()
    errors = [squared_error(weight, importance, left, right)]
    for iterations in range(1, 30):
        found = alternating_least_squares(weight, importance, left, right, iterations, 0.0)
        errors.append(loop_error(weight, importance, found[0] @ found[1]))
        assert errors[-1] < errors[-2]
    first, by_hand = improve_left(weight, importance, left, right)
    second = improve_left(weight.T, importance.T, by_hand.T, first.T)
    by_hand_error = loop_error(weight, importance, (second[0] @ second[1]).T)
    assert errors[1] == pytest.approx(by_hand_error, rel=1e-9)
    gains = [1 - after / before for before, after in pairwise(errors)]
    stop = next(index for index, gain in enumerate(gains) if gain < 1e-2)
    assert 1 < stop < 28
    counted = Mock(wraps=improve_left)
    monkeypatch.setattr(elementwise, "improve_left", counted)
    left, right = alternating_least_squares(weight, importance, left, right, 30, 1e-2)
    assert counted.call_count == 2 * (stop + 1)
    assert squared_error(weight, importance, left, right) == pytest.approx(errors[stop + 1], rel=1e-9)


def test_a_sweep_that_loses_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance, left, right = problem()
    monkeypatch.setattr(elementwise, "improve_left", lambda _w, _i, left, right: (2 * left, right))
    found = alternating_least_squares(weight, importance, left, right, 5, 0.0)
    assert found[0] is left and found[1] is right


def test_optimum_and_exact_fit_stay() -> None:
    """At the optimum, and at error 0, nothing moves and nothing becomes NaN."""
    _, importance, left, right = problem()
    weight = left @ right
    found = alternating_least_squares(weight, importance, left, right, 5, 1e-4)
    torch.testing.assert_close(found[0] @ found[1], weight)
    found = alternating_least_squares(weight, torch.ones_like(weight), *(0 * left, 0 * right), 5, 1e-4)
    assert found[0].isfinite().all() and found[1].isfinite().all()


def test_rows_and_columns_without_importance_stay_finite() -> None:
    """A row without any importance keeps its start; the rest is what it is without that row and column."""
    weight, importance, left, right = problem()
    importance[2], importance[:, 4] = 0.0, 0.0
    new_left, new_right = improve_left(weight, importance, left, right)
    torch.testing.assert_close((new_left @ new_right)[2], (left @ right)[2])
    assert new_left.isfinite().all() and new_right.isfinite().all()
    rows = [i for i in range(7) if i != 2]
    columns = [j for j in range(9) if j != 4]
    small = alternating_least_squares(
        weight[rows][:, columns], importance[rows][:, columns], left[rows], right[:, columns], 200, 1e-9
    )
    found = alternating_least_squares(weight, importance, left, right, 200, 1e-9)
    assert (found[0] @ found[1]).abs().max() < 100
    torch.testing.assert_close((found[0] @ found[1])[rows][:, columns], small[0] @ small[1], rtol=0, atol=1e-3)


def test_fewer_elements_that_count_than_ranks() -> None:
    """Singular problems: a mask of a few elements is met exactly, without wild values elsewhere."""
    weight, _, left, right = problem(rank=5)
    mask = (torch.rand(7, 9, generator=torch.Generator().manual_seed(3)) < 0.3).double()
    found = alternating_least_squares(weight, mask, left, right, 200, 1e-9)
    approx = found[0] @ found[1]
    assert squared_error(weight, mask, *found) < 1e-6 and approx.abs().max() < 100
