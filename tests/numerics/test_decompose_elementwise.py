"""The decomposition with one importance per element, against the closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from decompositions import SHAPES, positive, product
from moments import draw
from torch import Tensor

from lit_compress.numerics.decompose import Axis, Importance, decompose, decompose_elementwise, weighted_error
from lit_compress.utils.errors import UserError


def squared(weight: Tensor, approx: Tensor, importance: Tensor) -> float:
    return weighted_error(weight, approx, importance, "element") ** 2


def spread(*shape: int, seed: int = 7) -> Tensor:
    return (2 * draw(*shape, seed=seed)).exp()


@pytest.mark.parametrize("shape", [(10, 14), (14, 10), (12, 12)])
def test_element_wise_is_never_worse_than_closed_forms(shape: tuple[int, int]) -> None:
    """Invariant 17: below the row-weighted, the column-weighted, the two-sided form, far below the plain SVD."""
    weight, importance = draw(*shape), spread(*shape)
    rows, columns = importance.sum(1), importance.sum(0)
    for rank in (1, 3, 6):
        approx = product(weight, rank, importance, "element")
        error = squared(weight, approx, importance)
        closed = [(rows, "out"), (columns, "in"), ((rows, columns), "both"), (None, "out")]
        assert all(error < 0.999 * squared(weight, product(weight, rank, *form), importance) for form in closed)
        assert torch.linalg.svdvals(approx)[rank:].max() < 1e-10
        for factor in (2.0**-600, 2.0**600):
            torch.testing.assert_close(product(weight, rank, importance * factor, "element"), approx)


def test_element_wise_falls_with_the_iterations() -> None:
    """Invariant 17: monotone, and 0 iterations are the best closed form."""
    weight, importance = draw(10, 14), spread(10, 14)
    rows, columns = importance.sum(1), importance.sum(0)
    errors = []
    for iterations in range(8):
        left, right = decompose_elementwise(weight, 3, importance, iterations, tolerance=0.0)
        errors.append(squared(weight, left @ right, importance))
    assert all(after < before for before, after in pairwise(errors))
    closed = [(rows, "out"), (columns, "in"), ((rows, columns), "both")]
    best = min(squared(weight, product(weight, 3, *form), importance) for form in closed)
    assert errors[0] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("best", ["out", "in", "both"])
def test_element_wise_starts_at_the_best_closed_form(best: Axis) -> None:
    """Each of the three is the best somewhere, so none is superfluous; found by search over seeds."""
    for seed in range(200):
        weight, importance = draw(6, 6, seed=seed), spread(6, 6, seed=seed + 1000)
        rows, columns = importance.sum(1), importance.sum(0)
        forms: dict[str, Importance] = {"out": rows, "in": columns, "both": (rows, columns)}
        error = {axis: squared(weight, product(weight, 2, values, axis), importance) for axis, values in forms.items()}
        if min(error, key=error.__getitem__) == best:
            left, right = decompose_elementwise(weight, 2, importance, iterations=0)
            assert squared(weight, left @ right, importance) == pytest.approx(error[best], rel=1e-9)
            return
    pytest.fail(f"{best} never was the best")


@pytest.mark.parametrize("shape", SHAPES)
def test_element_wise_with_an_importance_that_has_a_closed_form(shape: tuple[int, int]) -> None:
    """Invariant 17: constant -> SVD, rows -> row-weighted, columns -> column-weighted, a b^T -> two-sided."""
    weight = draw(*shape)
    a, b = positive(shape[0], 3), positive(shape[1], 4)
    ones_a, ones_b = torch.ones_like(a), torch.ones_like(b)
    for pair in ((ones_a, ones_b), (a, ones_b), (ones_a, b), (a, b)):
        importance = pair[0][:, None] * pair[1]
        for rank in range(1, min(shape) + 1):
            approx = product(weight, rank, importance, "element")
            torch.testing.assert_close(approx, product(weight, rank, pair, "both"), rtol=0, atol=1e-9)


def test_element_wise_power_and_side() -> None:
    """Power 1 weights squares by the square; sigma goes where it was asked, by default in."""
    weight, importance = draw(8, 10), spread(8, 10)
    torch.testing.assert_close(
        product(weight, 3, importance, "element", 1.0), product(weight, 3, importance**2, "element")
    )
    base = product(weight, 3, importance, "element")
    sigma, ones = torch.linalg.svdvals(base)[:3], torch.ones(3, dtype=torch.float64)
    wanted = {None: (ones, sigma), "in": (ones, sigma), "out": (sigma, ones), "balanced": (sigma.sqrt(), sigma.sqrt())}
    for side, (left_norm, right_norm) in wanted.items():
        left, right = decompose(weight, 3, importance, "element", sigma_side=side)  # type: ignore[arg-type]
        torch.testing.assert_close(left @ right, base)
        torch.testing.assert_close(left.norm(dim=0), left_norm)
        torch.testing.assert_close(right.norm(dim=1), right_norm)
    plain = decompose(weight, 3, None, "element")
    assert all(map(torch.equal, plain, decompose(weight, 3, axis="in")))
    half, right = decompose(weight.float().requires_grad_(), 3, importance.float(), "element")
    assert half.dtype == torch.float32 and not half.requires_grad
    torch.testing.assert_close((half @ right).double(), base, rtol=0, atol=1e-4)


def test_element_wise_importance_that_says_nothing() -> None:
    """Zeros, inf, NaN, a negative under the root: the plain SVD and a warning that names the matrix."""
    weight = draw(6, 4)
    for value in (math.nan, math.inf, -1.0, 0.0):
        importance = spread(6, 4)
        importance[1 if value else slice(None)] = value
        with pytest.warns(UserWarning, match="layer.3.query: importance"):
            approx = product(weight, 2, importance, "element", name="layer.3.query")
        torch.testing.assert_close(approx, product(weight, 2))
    for call in (decompose_elementwise, lambda w, k, i, name: decompose(w, k, i, "element", name=name)):
        with pytest.raises(UserError, match="query: rank 5 does not fit"):
            call(weight, 5, spread(6, 4), name="query")
        with pytest.raises(UserError, match="query: holds inf or NaN"):
            call(weight / 0, 2, spread(6, 4), name="query")
