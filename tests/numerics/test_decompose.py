"""The truncated SVD weighted along rows or columns, against the papers' literal formulas."""

from __future__ import annotations

import math
import warnings
from unittest.mock import Mock

import pytest
import torch
from moments import SHAPES, decompose, draw, weighted_error
from torch import Tensor

from lit_compress.numerics import decompose as module
from lit_compress.numerics.decompose import Side, weighted_svd
from lit_compress.utils.errors import UserError

AXES = ["none", "out", "in"]


def positive(size: int, seed: int = 3) -> Tensor:
    """Draw a vector of importances."""
    return draw(size, seed=seed).abs() + 0.1


def product(weight: Tensor, rank: int, *args: object, **kwargs: object) -> Tensor:
    """Return the product of the factors that ``decompose`` gives, whose form is checked."""
    left, right = decompose(weight, rank, *args, **kwargs)  # type: ignore[arg-type]
    assert left.shape == (weight.shape[0], rank) and right.shape == (rank, weight.shape[1])
    assert left.is_contiguous() and right.is_contiguous() and left.dtype == right.dtype == weight.dtype
    return left @ right


def importance_of(weight: Tensor, axis: str) -> Tensor | None:
    """Return importances for a matrix along an axis: none, of rows, or of columns."""
    rows, columns = positive(weight.shape[0], 3), positive(weight.shape[1], 4) ** 2
    return {"none": None, "out": rows, "in": columns}[axis]


def nested(axis: str) -> Side:
    """Return the axis that ``weighted_svd`` takes for one of ``AXES``."""
    return "out" if axis == "none" else axis  # type: ignore[return-value]


def sides(axis: str) -> tuple[Side, ...]:
    """Return the sides that the singular values can be on for one of ``AXES``."""
    return ("out", "in", "balanced") if axis == "none" else (nested(axis),)


def diagonals(weight, importance, axis):
    """Return the matrices that the weight is multiplied by from the left and from the right."""
    rows, columns = (torch.ones(size, dtype=torch.float64) for size in weight.shape)
    if axis != "none":
        rows, columns = {"out": (importance, columns), "in": (rows, importance)}[axis]
    return torch.diag(rows.sqrt()), torch.diag(columns.sqrt())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", AXES)
def test_every_rank_equals_the_literal_formula(shape: tuple[int, int], axis: str) -> None:
    """D_a^-1 SVD_k(D_a W D_b) D_b^-1; full rank reproduces W; the error is what sigma leaves out (invariants 1-4, 8).

    One decomposition gives the same as one of each rank.
    """
    weight = draw(*shape)
    importance = importance_of(weight, axis)
    rows, columns = diagonals(weight, importance, axis)
    u, s, vh = torch.linalg.svd(rows @ weight @ columns, full_matrices=False)
    whole = weighted_svd(weight, importance, nested(axis))
    torch.testing.assert_close(whole.sigma, s)
    for rank in range(1, min(shape) + 1):
        low = torch.linalg.inv(rows) @ u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank] @ torch.linalg.inv(columns)
        for side in sides(axis):
            approx = product(weight, rank, importance, side)
            torch.testing.assert_close(approx, low, rtol=0, atol=1e-10)
        torch.testing.assert_close(whole.factors(rank), decompose(weight, rank, importance, nested(axis)))
        error = weighted_error(weight, approx, importance, nested(axis))
        assert error**2 == pytest.approx(float((s[rank:] ** 2).sum()), rel=1e-9, abs=1e-18)
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", AXES)
def test_the_side_of_the_singular_values(shape: tuple[int, int], axis: str) -> None:
    """Where it was asked for (invariant 8); with an importance on its side."""
    weight = draw(*shape)
    importance, sigma = importance_of(weight, axis), torch.linalg.svdvals(weight)
    for rank in range(1, min(shape) + 1):
        norms = {}
        for side in sides(axis):
            left, right = decompose(weight, rank, importance, side)
            norms[side] = torch.stack([left.norm(dim=0), right.norm(dim=1)])
        if axis in ("out", "in"):
            torch.testing.assert_close(norms[nested(axis)][1 if axis == "out" else 0], torch.ones(rank).double())
            continue
        torch.testing.assert_close(norms["balanced"].prod(0), norms["in"].prod(0))
        torch.testing.assert_close(norms["balanced"].prod(0), norms["out"].prod(0))
        for side, left_power in (("out", 1.0), ("in", 0.0), ("balanced", 0.5)):
            powers = torch.stack([sigma[:rank] ** left_power, sigma[:rank] ** (1 - left_power)])
            torch.testing.assert_close(norms[side], powers)


@pytest.mark.parametrize("axis", ["out", "in"])
def test_what_does_not_matter(axis):
    """Invariant 5: scale, constant importance, and the transpose; but sigma keeps the scale.

    A global budget compares sigma over matrices (spec 2.3).
    """
    weight = draw(6, 9)
    importance = importance_of(weight, axis)
    base = product(weight, 3, importance, axis)
    for factor in (1e-6, 1e6, 1e-300, 1e300):
        torch.testing.assert_close(product(weight, 3, importance * factor, axis), base, rtol=0, atol=1e-10)
    whole = weighted_svd(weight, importance, axis).sigma
    for factor in (1e-12, 4.0, 1e12):
        sigma = weighted_svd(weight, importance * factor, axis).sigma
        torch.testing.assert_close(sigma, whole * factor**0.5)
    torch.testing.assert_close(product(weight, 3, importance / importance.max() * 1.7e308, axis), base)
    constant = torch.full_like(importance, 0.37)
    torch.testing.assert_close(product(weight, 3, constant, axis), product(weight, 3), rtol=0, atol=1e-10)
    turned = product(weight.T, 3, importance, "in" if axis == "out" else "out")
    torch.testing.assert_close(turned.T, base, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("kept", [1, 2])
def test_zero_importances(shape: tuple[int, int], axis: Side, kept: int) -> None:
    """Invariant 6: finite, and full rank still reproduces W, though the multipliers span four decades and more."""
    weight = draw(*shape)
    rows, columns = (torch.zeros(size, dtype=torch.float64) for size in shape)
    rows[:kept], columns[-kept:] = 1.0, 1.0
    importance = rows if axis == "out" else columns
    where = slice(None) if axis == "in" else slice(kept), slice(None) if axis == "out" else slice(-kept, None)
    whole = weighted_svd(weight, importance, axis)
    for rank in range(1, min(shape) + 1):
        approx = torch.mm(*whole.factors(rank))
        assert approx.isfinite().all()
        assert rank < kept or (weight - approx)[where].abs().max() < 1e-2
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_zero_rows_and_low_rank(axis: str, gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: a zero row stays exactly zero; rank(W) <= rank is exact; balanced survives sigma 0."""
    monkeypatch.setattr(module, "GRAM_FROM", 1 if gram else 4096)
    weight = draw(8, 3) @ draw(3, 7, seed=1)
    weight[2] = 0.0
    for shaped in (weight, weight.T):
        importance = importance_of(shaped, axis)
        for side in sides(axis):
            left, right = decompose(shaped, 5, importance, side)
            torch.testing.assert_close(left @ right, shaped, rtol=0, atol=1e-10)
            assert right.isfinite().all() and left.isfinite().all()
    if axis in ("none", "out"):
        assert not decompose(weight, 5, importance_of(weight, axis))[0][2].any()
    left, right = decompose(torch.zeros(4, 5), 2, side="balanced")
    assert not left.any() and right.isfinite().all()


@pytest.mark.parametrize("broken", [0.0, math.nan, math.inf])
def test_importance_that_says_nothing(broken: float) -> None:
    """Invariant 6: it counts as constant, and a warning names matrix and side; of zeros sigma is 0."""
    weight, rows, columns = draw(6, 4), positive(6), positive(4)
    rows[1 if broken else slice(None)], columns[1 if broken else slice(None)] = broken, broken
    for bad, axis, said in ((rows, "out", "rows"), (columns, "in", "columns")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = weighted_svd(weight, bad, axis, name="layer.3.query")  # type: ignore[arg-type]
        assert [str(warning.message).startswith(f"layer.3.query: importance of {said}") for warning in caught] == [True]
        assert caught[0].filename == __file__
        expected = weighted_svd(weight, None, axis)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.mm(*found.factors(2)), torch.mm(*expected.factors(2)))
        torch.testing.assert_close(found.sigma, expected.sigma * bool(broken))


def test_negative_importance() -> None:
    """Invariant 37: it has no root, which a warning says."""
    weight, importance = draw(6, 4), positive(6)
    importance[2] *= -1
    with pytest.warns(UserWarning, match="weight: importance"):
        torch.testing.assert_close(product(weight, 2, importance), product(weight, 2))


def test_refusals() -> None:
    weight = draw(6, 4)
    weight[1, 1] = math.nan
    with pytest.raises(UserError, match="query: holds inf or NaN"):
        decompose(weight, 2, name="query")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Factors have the weight's; the SVD outlives the weight, into which others may write."""
    weight = draw(6, 4).to(dtype).requires_grad_()
    whole, before = weighted_svd(weight, positive(6).float()), weight.detach().clone()
    left, right = whole.factors(4)
    assert left.dtype == right.dtype == dtype and not left.requires_grad
    torch.testing.assert_close((left @ right).double(), before.double(), rtol=0, atol=0.05)
    weight.data.zero_()
    assert all(torch.equal(*pair) for pair in zip(whole.factors(4), (left, right), strict=True))


@pytest.mark.parametrize("shape", [(20, 33), (33, 20), (24, 24)])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("zeros", [False, True])
def test_gram_matrix_instead_of_an_svd(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], axis: str, zeros: bool
) -> None:
    """Large matrices go over the Gram matrix: the same sigma and products, exact at full rank."""
    weight = draw(*shape)
    importance = importance_of(weight, axis)
    if zeros and importance is not None:
        importance[::3] = 0.0
    exact = weighted_svd(weight, importance, nested(axis))
    eigh = Mock(wraps=torch.linalg.eigh)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    monkeypatch.setattr(module, "GRAM_FROM", min(shape))
    gram = weighted_svd(weight, importance, nested(axis))
    assert [matrix.shape for (matrix,), _ in eigh.call_args_list] == [(min(shape), min(shape))]
    torch.testing.assert_close(gram.sigma, exact.sigma, rtol=0, atol=1e-7 * float(exact.sigma[0]))
    assert (gram.sigma.diff() <= 0).all()
    for rank in (1, 5, 12):
        assert float(exact.sigma[rank] / exact.sigma[0]) > 1e-4  # both tell these components apart
        torch.testing.assert_close(torch.mm(*gram.factors(rank)), torch.mm(*exact.factors(rank)), rtol=0, atol=1e-7)
        alone = decompose(weight, rank, importance, nested(axis))
        torch.testing.assert_close(torch.mm(*alone), torch.mm(*gram.factors(rank)), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.mm(*gram.factors(min(shape))), weight, rtol=0, atol=1e-10)


def test_small_matrices_keep_the_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been trained from BERT-sized factors does not change with the shortcut."""
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: pytest.fail("Gram matrix used"))
    weighted_svd(draw(64, 4097))
    assert module.GRAM_FROM == 4096
