"""The truncated SVD weighted along one axis against the papers' literal formulas."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from decompositions import SHAPES, nested, positive, product
from moments import draw
from torch import Tensor

from lit_compress.numerics.decompose import Axis, component_groups, decompose, rank_of, weighted_error
from lit_compress.utils.errors import UserError


def literal(weight: Tensor, rank: int, d: Tensor, axis: Axis) -> Tensor:
    """The papers' formula with the inverse: D^-1 U_k S_k V_k^T (out), U_k S_k V_k^T D^-1 (in)."""
    scale = torch.diag(d)
    u, s, vh = torch.linalg.svd(scale @ weight if axis == "out" else weight @ scale, full_matrices=False)
    low = u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]
    return torch.linalg.inv(scale) @ low if axis == "out" else low @ torch.linalg.inv(scale)


def importance_for(weight: Tensor, axis: Axis, seed: int = 3) -> Tensor:
    return positive(weight.shape[0 if axis == "out" else 1], seed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_equals_the_literal_formula(shape: tuple[int, int], axis: Axis, power: float) -> None:
    """Invariants 1, 2, 4: full rank reproduces W; every rank equals the formula; error = dropped sigmas."""
    weight = draw(*shape)
    importance = importance_for(weight, axis)
    d = importance**power
    scaled = d[:, None] * weight if axis == "out" else weight * d
    sigma = torch.linalg.svdvals(scaled)
    for rank in range(1, min(shape) + 1):
        approx = product(weight, rank, importance, axis, power)
        torch.testing.assert_close(approx, literal(weight, rank, d, axis), rtol=0, atol=1e-10)
        error = weighted_error(weight, approx, importance, axis, power)
        assert error**2 == pytest.approx(float((sigma[rank:] ** 2).sum()), rel=1e-9, abs=1e-18)
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_svd_and_its_sides(shape: tuple[int, int]) -> None:
    """Invariants 2, 8: error = dropped sigmas; the three sides have one product, sigma where it was asked."""
    weight = draw(*shape)
    u, sigma, vh = torch.linalg.svd(weight, full_matrices=False)
    for rank in range(1, min(shape) + 1):
        low = u[:, :rank] @ torch.diag(sigma[:rank]) @ vh[:rank]
        for side, left_power in (("out", 1.0), ("in", 0.0), ("balanced", 0.5)):
            left, right = decompose(weight, rank, sigma_side=side)  # type: ignore[arg-type]
            torch.testing.assert_close(left @ right, low, rtol=0, atol=1e-10)
            torch.testing.assert_close(left.norm(dim=0), sigma[:rank] ** left_power)
            torch.testing.assert_close(right.norm(dim=1), sigma[:rank] ** (1 - left_power))
            assert left.numel() + right.numel() == rank * sum(shape)
        assert weighted_error(weight, low) ** 2 == pytest.approx(float((sigma[rank:] ** 2).sum()), rel=1e-9, abs=1e-18)
    assert torch.equal(decompose(weight, 2)[0], decompose(weight, 2, sigma_side="out")[0])
    assert torch.equal(decompose(weight, 2, axis="in")[0], decompose(weight, 2, sigma_side="in")[0])


@pytest.mark.parametrize("axis", ["out", "in"])
def test_each_is_best_at_its_own_error(axis: Axis) -> None:
    """Invariant 3: weighting helps the weighted error and costs Frobenius error."""
    weight = draw(8, 10)
    importance = importance_for(weight, axis)
    for rank in range(1, 8):
        weighted, plain = product(weight, rank, importance, axis), product(weight, rank)
        assert weighted_error(weight, weighted, importance, axis) < weighted_error(weight, plain, importance, axis)
        assert weighted_error(weight, weighted) > weighted_error(weight, plain)


def test_power_half_minimises_equation_seven() -> None:
    """Invariant 37: of {1/2, 1, plain}, 1/2 is best for sum S (W - X)^2 and 1 for sum S^2 (W - X)^2."""
    weight, importance = draw(8, 10), positive(8) ** 3
    candidates = {"half": product(weight, 3, importance, power=0.5)}
    candidates["one"] = product(weight, 3, importance, power=1.0)
    candidates["plain"] = product(weight, 3)

    def objective(approx: Tensor, power: int) -> float:
        total = 0.0
        for i in range(8):
            for j in range(10):
                total += float(importance[i]) ** power * float(weight[i, j] - approx[i, j]) ** 2
        return total

    assert min(candidates, key=lambda name: objective(candidates[name], 1)) == "half"
    assert min(candidates, key=lambda name: objective(candidates[name], 2)) == "one"
    assert min(candidates, key=lambda name: objective(candidates[name], 0)) == "plain"
    assert weighted_error(weight, candidates["plain"], importance) ** 2 == pytest.approx(
        objective(candidates["plain"], 1)
    )
    torch.testing.assert_close(product(weight, 3, importance), candidates["half"], rtol=0, atol=0)


@pytest.mark.parametrize("axis", ["out", "in"])
def test_what_does_not_matter(axis: Axis) -> None:
    """Invariant 5: scale, sign (power 1), constant importance, and the transpose."""
    weight = draw(6, 9)
    importance = importance_for(weight, axis)
    base = product(weight, 3, importance, axis)
    for factor in (1e-6, 1e6, 1e-300, 1e300):
        torch.testing.assert_close(product(weight, 3, importance * factor, axis), base, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        product(weight, 3, importance / importance.max() * 1.7e308, axis, 1.0),
        product(weight, 3, importance, axis, 1.0),
    )
    signs = draw(len(importance), seed=9).sign()
    torch.testing.assert_close(
        product(weight, 3, importance * signs, axis, 1.0), product(weight, 3, importance, axis, 1.0)
    )
    constant = torch.full_like(importance, 0.37)
    torch.testing.assert_close(product(weight, 3, constant, axis), product(weight, 3), rtol=0, atol=1e-10)
    other: Axis = "in" if axis == "out" else "out"
    left, right = decompose(weight, 3, importance, axis)
    left_t, right_t = decompose(weight.T, 3, importance, other)
    torch.testing.assert_close(left_t @ right_t, base.T, rtol=0, atol=1e-10)
    assert left.norm() > right.norm() if axis == "out" else left.norm() < right.norm()  # sigma's side


def test_axis_matters() -> None:
    """The two papers weight different axes: on a square matrix only the result can tell."""
    weight, importance = draw(7, 7), positive(7) ** 2
    out, inside = product(weight, 3, importance, "out"), product(weight, 3, importance, "in")
    assert weighted_error(weight, out, importance, "out") < weighted_error(weight, inside, importance, "out")
    assert weighted_error(weight, inside, importance, "in") < weighted_error(weight, out, importance, "in")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("kept", [1, 2])
def test_zero_importances(shape: tuple[int, int], axis: Axis, kept: int) -> None:
    """Invariant 6: finite, and full rank still reproduces W, though fewer rows count than ranks are asked."""
    weight = draw(*shape)
    importance = torch.zeros(shape[0 if axis == "out" else 1], dtype=torch.float64)
    importance[:kept] = 1.0
    for rank in range(1, min(shape) + 1):
        approx = product(weight, rank, importance, axis)
        assert approx.isfinite().all()
        first = (weight - approx)[:kept] if axis == "out" else (weight - approx)[:, :kept]
        assert first.abs().max() < 1e-2 if rank >= kept else True
    torch.testing.assert_close(approx, weight, rtol=0, atol=1e-10)


def test_zero_rows_and_low_rank() -> None:
    """Invariant 7: a zero row stays exactly zero; rank(W) <= rank is exact; balanced survives sigma 0."""
    weight = draw(8, 3) @ draw(3, 7, seed=1)
    weight[2] = 0.0
    for kwargs in ({}, {"importance": positive(8)}, {"sigma_side": "balanced"}):
        left, right = decompose(weight, 5, **kwargs)  # type: ignore[arg-type]
        torch.testing.assert_close(left @ right, weight, rtol=0, atol=1e-10)
        assert right.isfinite().all() and left.isfinite().all()
        assert (left[2] == 0).all()
    left, right = decompose(torch.zeros(4, 5), 2, sigma_side="balanced")
    assert not left.any() and right.isfinite().all()


@pytest.mark.parametrize(
    "importance",
    [torch.zeros(6), torch.tensor([1.0, math.nan, 1, 1, 1, 1]), torch.tensor([1.0, math.inf, 1, 1, 1, 1])],
)
def test_importance_that_says_nothing(importance: Tensor) -> None:
    """Invariant 6: the plain SVD, and a warning that names the matrix."""
    weight = draw(6, 4)
    with pytest.warns(UserWarning, match="layer.3.query"):
        approx = product(weight, 2, importance, name="layer.3.query")
    assert torch.equal(approx, product(weight, 2))


def test_negative_importance() -> None:
    """Invariant 37: with power 1 it acts as its absolute value; under a root there is a warning."""
    weight, importance = draw(6, 4), positive(6)
    importance[2] *= -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(
            product(weight, 2, importance, power=1.0), product(weight, 2, importance.abs(), power=1.0)
        )
    with pytest.warns(UserWarning, match="weight: importance"):
        torch.testing.assert_close(product(weight, 2, importance, power=0.5), product(weight, 2))


def test_refusals() -> None:
    weight = draw(6, 4)
    for rank in (0, 5, -1):
        with pytest.raises(UserError, match=r"query: rank -?\d does not fit a 6 x 4 matrix; valid: 1 to 4"):
            decompose(weight, rank, name="query")
    weight[1, 1] = math.nan
    with pytest.raises(UserError, match="query: holds inf or NaN"):
        decompose(weight, 2, name="query")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    weight = draw(6, 4).to(dtype).requires_grad_()
    left, right = decompose(weight, 4, positive(6).float())
    assert left.dtype == right.dtype == dtype and not left.requires_grad
    torch.testing.assert_close((left @ right).double(), weight.detach().double(), rtol=0, atol=0.05)


def test_numerical_rank() -> None:
    """Invariant 28: rows left are the rank; a float32 product reports its own; random pruning loses none."""
    weight = draw(40, 30)
    assert rank_of(weight) == 30
    weight[5:] = 0.0
    assert rank_of(weight) == 5
    assert rank_of(draw(60, 11).float() @ draw(11, 50, seed=1).float()) == 11
    assert rank_of(torch.zeros(4, 5)) == 0
    random = draw(200, 200) * (torch.rand(200, 200, generator=torch.Generator().manual_seed(1)) < 0.1)
    assert rank_of(random) >= 0.98 * 200


def test_component_groups() -> None:
    """Invariant 18: the bounds of tensor_split; 768 = 8 x 77 + 2 x 76."""
    assert [last - first for first, last in component_groups(768)] == [77] * 8 + [76] * 2
    for size, groups in ((768, 10), (10, 10), (7, 3), (3, 5), (64, 1)):
        parts = torch.arange(size).tensor_split(groups)
        bounds = component_groups(size, groups)
        assert len(bounds) == groups and bounds[0][0] == 0 and bounds[-1][1] == size
        assert [list(range(*bound)) for bound in bounds] == [part.tolist() for part in parts]


def test_weighted_error_by_hand() -> None:
    weight, approx = draw(3, 4), draw(3, 4, seed=1)
    a, b = positive(3), positive(4)
    for power in (0.5, 1.0):
        totals = {"none": 0.0, "out": 0.0, "in": 0.0, "both": 0.0}
        for i in range(3):
            for j in range(4):
                square = float(weight[i, j] - approx[i, j]) ** 2
                totals["none"] += square
                totals["out"] += square * float(a[i]) ** (2 * power)
                totals["in"] += square * float(b[j]) ** (2 * power)
                totals["both"] += square * float(a[i] * b[j]) ** (2 * power)
        for axis, importance in (("none", None), ("out", a), ("in", b), ("both", (a, b))):
            error = weighted_error(weight, approx, importance, nested(axis), power)
            assert error**2 == pytest.approx(totals[axis], rel=1e-12)
