"""The weighted truncated SVD against the papers' literal formulas."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lit_compress.numerics import decompose as module
from lit_compress.numerics.decompose import (
    Axis,
    Importance,
    Nested,
    component_groups,
    decompose,
    decompose_elementwise,
    rank_of,
    weighted_error,
    weighted_svd,
)
from lit_compress.utils.errors import UserError

SHAPES = [(6, 9), (9, 6), (7, 7)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(size: int, seed: int = 3) -> Tensor:
    return draw(size, seed=seed).abs() + 0.1


def product(weight: Tensor, rank: int, *args: object, **kwargs: object) -> Tensor:
    left, right = decompose(weight, rank, *args, **kwargs)  # type: ignore[arg-type]
    assert left.shape == (weight.shape[0], rank) and right.shape == (rank, weight.shape[1])
    assert left.is_contiguous() and right.is_contiguous() and left.dtype == right.dtype == weight.dtype
    return left @ right


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


def importance_of(weight: Tensor, axis: str) -> Importance | None:
    rows, columns = positive(weight.shape[0], 3), positive(weight.shape[1], 4) ** 2
    return {"none": None, "out": rows, "in": columns, "both": (rows, columns)}[axis]


def nested(axis: str) -> Nested:
    return "out" if axis == "none" else axis  # type: ignore[return-value]


ALL = ["none", "out", "in", "both"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ALL)
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_one_svd_serves_every_rank(shape: tuple[int, int], axis: str, power: float) -> None:
    """Every rank is bit for bit what a decomposition of its own gives; sigma is what each rank leaves out."""
    weight = draw(*shape)
    importance = importance_of(weight, axis)
    whole = weighted_svd(weight, importance, nested(axis), power)
    assert whole.sigma.dtype == torch.float64 and whole.sigma.shape == (min(shape),)
    assert (whole.sigma.diff() <= 0).all()
    for rank in range(1, min(shape) + 1):
        left, right = whole.factors(rank)
        for ours, alone in zip((left, right), decompose(weight, rank, importance, nested(axis), power), strict=True):
            assert torch.equal(ours, alone)
        error = weighted_error(weight, left @ right, importance, nested(axis), power)
        assert error**2 == pytest.approx(float((whole.sigma[rank:] ** 2).sum()), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("axis", ["out", "in", "both"])
def test_sigma_keeps_the_scale_of_the_importance(axis: Nested) -> None:
    """Spec 2.3: a global budget compares sigma over matrices, so no normalisation may be left in it."""
    weight = draw(6, 9)
    importance = importance_of(weight, axis)
    base = weighted_svd(weight, importance, axis)
    for factor in (1e-12, 4.0, 1e12):
        scaled = tuple(i * factor for i in importance) if isinstance(importance, tuple) else importance * factor
        whole = weighted_svd(weight, scaled, axis)
        torch.testing.assert_close(whole.sigma, base.sigma * (factor if axis == "both" else factor**0.5))
        torch.testing.assert_close(torch.mm(*whole.factors(3)), torch.mm(*base.factors(3)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", ALL)
def test_groups_of_components(shape: tuple[int, int], axis: str) -> None:
    """Invariant 18, spec 3.7: what the groups take away adds up to W; a group is a difference of two ranks."""
    weight = draw(*shape)
    whole = weighted_svd(weight, importance_of(weight, axis), nested(axis))
    products = [torch.zeros_like(weight)] + [torch.mm(*whole.factors(k)) for k in range(1, min(shape) + 1)]
    total = torch.zeros_like(weight)
    for first, last in component_groups(min(shape), 4):
        taken = weight - whole.without(first, last)
        torch.testing.assert_close(taken, products[last] - products[first], rtol=0, atol=1e-10)
        total += taken
    torch.testing.assert_close(total, weight, rtol=0, atol=1e-10)
    assert torch.equal(whole.without(2, 2), weight)


def test_groups_in_the_closed_form() -> None:
    """Spec 3.7: W - W V_g V_g^T for rows, W - U_g U_g^T W for columns."""
    weight, rows, columns = draw(6, 9), positive(6), positive(9)
    v = torch.linalg.svd(rows.sqrt()[:, None] * weight, full_matrices=False)[2][1:3].T
    u = torch.linalg.svd(weight * columns.sqrt(), full_matrices=False)[0][:, 1:3]
    out, inside = weighted_svd(weight, rows, "out"), weighted_svd(weight, columns, "in")
    torch.testing.assert_close(out.without(1, 3), weight - weight @ v @ v.T, rtol=0, atol=1e-10)
    torch.testing.assert_close(inside.without(1, 3), weight - u @ u.T @ weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_svd_outlives_the_weight(dtype: torch.dtype) -> None:
    """The grouped truncation writes into the net's weight; the SVD made before must not notice."""
    weight = draw(6, 9).to(dtype)
    whole = weighted_svd(weight, positive(6))
    left, rest = whole.factors(3)[0], whole.without(0, 2)
    weight.copy_(rest)
    assert torch.equal(whole.factors(3)[0], left) and torch.equal(whole.without(0, 2), rest)
    assert rest.dtype == left.dtype == dtype and rest.is_contiguous()


def test_refusals_of_the_svd() -> None:
    whole = weighted_svd(draw(6, 4), name="query")
    for rank in (0, 5):
        with pytest.raises(UserError, match=r"query: rank \d does not fit a 6 x 4 matrix; valid: 1 to 4"):
            whole.factors(rank)
    with pytest.raises(UserError, match="key: holds inf or NaN"):
        weighted_svd(torch.full((3, 3), math.inf), name="key")


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
    close = {"rtol": 0, "atol": 1e-10}
    base = product(weight, 3, (a, b), "both")
    torch.testing.assert_close(product(weight, 3, (a, ones_b), "both"), product(weight, 3, a, "out"), **close)
    torch.testing.assert_close(product(weight, 3, (ones_a, b), "both"), product(weight, 3, b, "in"), **close)
    torch.testing.assert_close(product(weight, 3, (ones_a, ones_b), "both"), product(weight, 3), **close)
    torch.testing.assert_close(product(weight, 3, None, "both"), product(weight, 3), **close)
    torch.testing.assert_close(product(weight, 3, (a * 1e-300, b * 1e300), "both"), base, **close)
    left, right = decompose(weight.T, 3, (b, a), "both")
    torch.testing.assert_close((left @ right).T, base, **close)
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


def test_sigma_without_a_usable_importance() -> None:
    """Where nothing matters nothing is worth a rank; what is not finite leaves the plain SVD's values."""
    weight = draw(6, 4)
    with pytest.warns(UserWarning):
        assert not weighted_svd(weight, torch.zeros(6)).sigma.any()
    with pytest.warns(UserWarning):
        assert not weighted_svd(weight, (positive(6), torch.zeros(4)), "both").sigma.any()
    for broken in (torch.full((6,), math.nan), torch.tensor([1.0, -1, 1, 1, 1, 1])):
        with pytest.warns(UserWarning):
            assert torch.equal(weighted_svd(weight, broken).sigma, weighted_svd(weight).sigma)


@pytest.mark.parametrize("shape", [(20, 33), (33, 20), (24, 24)])
@pytest.mark.parametrize("axis", ALL)
@pytest.mark.parametrize("zeros", [False, True])
def test_gram_matrix_instead_of_an_svd(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], axis: str, zeros: bool
) -> None:
    """Large matrices go over the Gram matrix: the same sigma, products and groups, exact at full rank."""
    weight = draw(*shape)
    importance = importance_of(weight, axis)
    if zeros and importance is not None:
        for side in importance if isinstance(importance, tuple) else (importance,):
            side[::3] = 0.0
    exact = weighted_svd(weight, importance, nested(axis))
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix.shape) or eigh(matrix))
    monkeypatch.setattr(module, "GRAM_FROM", min(shape))
    gram = weighted_svd(weight, importance, nested(axis))
    assert calls == [(min(shape), min(shape))]
    torch.testing.assert_close(gram.sigma, exact.sigma, rtol=0, atol=1e-7 * float(exact.sigma[0]))
    assert (gram.sigma.diff() <= 0).all()
    torch.testing.assert_close(gram.basis.T @ gram.basis, torch.eye(min(shape), dtype=torch.float64))
    for rank in (1, 5, 12):
        assert float(exact.sigma[rank] / exact.sigma[0]) > 1e-4  # both tell these components apart
        torch.testing.assert_close(torch.mm(*gram.factors(rank)), torch.mm(*exact.factors(rank)), rtol=0, atol=1e-7)
        alone = decompose(weight, rank, importance, nested(axis))
        torch.testing.assert_close(torch.mm(*alone), torch.mm(*gram.factors(rank)), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.mm(*gram.factors(min(shape))), weight, rtol=0, atol=1e-10)
    torch.testing.assert_close(gram.without(2, 9), exact.without(2, 9), rtol=0, atol=1e-7)


def test_gram_matrix_of_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7 there: rank(W) <= rank is exact, a zero row stays zero."""
    monkeypatch.setattr(module, "GRAM_FROM", 1)
    weight = draw(8, 3) @ draw(3, 11, seed=1)
    weight[2] = 0.0
    for shaped in (weight, weight.T):
        for side in ("out", "in", "balanced"):
            left, right = decompose(shaped, 5, sigma_side=side)  # type: ignore[arg-type]
            torch.testing.assert_close(left @ right, shaped, rtol=0, atol=1e-10)
            assert left.isfinite().all() and right.isfinite().all()
    assert not decompose(weight, 5, positive(8))[0][2].any()


def test_small_matrices_keep_the_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been trained from BERT-sized factors does not change with the shortcut."""
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: pytest.fail("Gram matrix used"))
    weighted_svd(draw(64, 4097))
    assert module.GRAM_FROM == 4096


def test_weighted_error_by_hand() -> None:
    weight, approx = draw(3, 4), draw(3, 4, seed=1)
    a, b, element = positive(3), positive(4), draw(3, 4, seed=5).abs()
    for power in (0.5, 1.0):
        totals = {"none": 0.0, "out": 0.0, "in": 0.0, "both": 0.0, "element": 0.0}
        for i in range(3):
            for j in range(4):
                square = float(weight[i, j] - approx[i, j]) ** 2
                totals["none"] += square
                totals["out"] += square * float(a[i]) ** (2 * power)
                totals["in"] += square * float(b[j]) ** (2 * power)
                totals["both"] += square * float(a[i] * b[j]) ** (2 * power)
                totals["element"] += square * float(element[i, j]) ** (2 * power)
        for axis, importance in (("none", None), ("out", a), ("in", b), ("both", (a, b)), ("element", element)):
            error = weighted_error(weight, approx, importance, nested(axis), power)
            assert error**2 == pytest.approx(totals[axis], rel=1e-12)


# --- one importance per element ---


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
    for call in (decompose_elementwise, lambda *a, **k: decompose(*a, axis="element", **k)):
        with pytest.raises(UserError, match="query: rank 5 does not fit"):
            call(weight, 5, spread(6, 4), name="query")
        with pytest.raises(UserError, match="query: holds inf or NaN"):
            call(weight / 0, 2, spread(6, 4), name="query")
