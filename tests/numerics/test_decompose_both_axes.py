"""The truncated SVD weighted along rows and columns at once."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from decompositions import SHAPES, positive, product
from moments import draw

from lit_compress.numerics.decompose import component_groups, decompose, weighted_error, weighted_svd


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_both_sides_equal_the_literal_formula(shape: tuple[int, int], power: float) -> None:
    """Spec 4: D_a^-1 SVD_k(D_a W D_b) D_b^-1; the sides of sigma have one product (invariants 1, 2, 4, 8)."""
    weight = draw(*shape)
    a, b = positive(shape[0], 3), positive(shape[1], 4)
    rows, columns = torch.diag(a**power), torch.diag(b**power)
    u, s, vh = torch.linalg.svd(rows @ weight @ columns, full_matrices=False)
    for rank in range(1, min(shape) + 1):
        low = torch.linalg.inv(rows) @ u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank] @ torch.linalg.inv(columns)
        for side in (None, "out", "in", "balanced"):
            approx = product(weight, rank, (a, b), "both", power, side)
            torch.testing.assert_close(approx, low, rtol=0, atol=1e-10)
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_sides_in_special_cases(shape: tuple[int, int]) -> None:
    """A constant side is no side; scale does not matter; sigma is where it was asked for."""
    weight = draw(*shape)
    a, b = positive(shape[0], 3), positive(shape[1], 4)
    ones_a, ones_b = torch.full_like(a, 0.3), torch.full_like(b, 7.0)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    base = product(weight, 3, (a, b), "both")
    close(product(weight, 3, (a, ones_b), "both"), product(weight, 3, a, "out"))
    close(product(weight, 3, (ones_a, b), "both"), product(weight, 3, b, "in"))
    close(product(weight, 3, (ones_a, ones_b), "both"), product(weight, 3))
    close(product(weight, 3, None, "both"), product(weight, 3))
    close(product(weight, 3, (a * 1e-300, b * 1e300), "both"), base)
    left, right = decompose(weight.T, 3, (b, a), "both")
    close((left @ right).T, base)
    for importance in ((a, b), None):
        norms = {}
        for side in (None, "in", "out", "balanced"):
            left, right = decompose(weight, 3, importance, "both", sigma_side=side)  # type: ignore[arg-type]
            norms[side] = torch.stack([left.norm(dim=0), right.norm(dim=1)])
        assert torch.equal(norms[None], norms["in"])
        torch.testing.assert_close(norms["balanced"].prod(0), norms["in"].prod(0))
        torch.testing.assert_close(norms["balanced"].prod(0), norms["out"].prod(0))
        assert (norms["out"][0] > norms["balanced"][0]).all() and (norms["balanced"][0] > norms["in"][0]).all()
    for other in ((None, "out"), (a, "out"), (b, "in")):
        worse = product(weight, 3, *other)  # type: ignore[misc]
        assert weighted_error(weight, base, (a, b), "both") < weighted_error(weight, worse, (a, b), "both")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("side", ["out", "in", "balanced"])
def test_zero_importances_on_both_sides(shape: tuple[int, int], kept: int, side: str) -> None:
    """Invariant 6: finite, and full rank reproduces W though both multipliers span four decades and more."""
    weight = draw(*shape)
    pair = (torch.zeros(shape[0], dtype=torch.float64), torch.zeros(shape[1], dtype=torch.float64))
    pair[0][:kept], pair[1][-kept:] = 1.0, 1.0
    whole = weighted_svd(weight, pair, "both", sigma_side=side)  # type: ignore[arg-type]
    assert whole.basis.shape == (min(shape), min(shape))  # square: exact up to the multipliers of one side alone
    for rank in range(1, min(shape) + 1):
        approx = torch.mm(*whole.factors(rank))
        assert approx.isfinite().all()
        if rank >= kept:
            assert (weight - approx)[:kept, -kept:].abs().max() < 1e-2
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)
    taken = [weight - whole.without(first, last) for first, last in component_groups(min(shape), 3)]
    torch.testing.assert_close(sum(taken), weight, rtol=0, atol=1e-10)
    weight[1] = 0.0  # invariant 7
    left, right = decompose(weight, min(shape), pair, "both", sigma_side=side)  # type: ignore[arg-type]
    torch.testing.assert_close(left @ right, weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("broken", [0.0, math.nan, math.inf])
def test_half_a_pair_that_says_nothing(broken: float) -> None:
    """The other side still counts; the warning names matrix and side."""
    weight, a, b = draw(6, 4), positive(6), positive(4)
    bad_a, bad_b = a.clone(), b.clone()
    bad_a[1 if broken else slice(None)], bad_b[1 if broken else slice(None)] = broken, broken
    with pytest.warns(UserWarning, match="layer.3.query: importance of rows"):
        approx = product(weight, 2, (bad_a, b), "both", name="layer.3.query")
    torch.testing.assert_close(approx, product(weight, 2, b, "in"))
    with pytest.warns(UserWarning, match="layer.3.query: importance of columns"):
        approx = product(weight, 2, (a, bad_b), "both", name="layer.3.query")
    torch.testing.assert_close(approx, product(weight, 2, a, "out"))
    with pytest.warns(UserWarning) as caught:
        approx = product(weight, 2, (bad_a, bad_b), "both")
    assert len(caught) == 2
    torch.testing.assert_close(approx, product(weight, 2))
