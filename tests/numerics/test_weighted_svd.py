"""One weighted SVD for every rank and every group of components; large matrices go over the Gram matrix."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch
from decompositions import AXES, SHAPES, importance_of, nested, positive
from moments import draw

from lit_compress.numerics import decompose as module
from lit_compress.numerics.decompose import Axis, component_groups, decompose, weighted_error, weighted_svd
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", AXES)
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
def test_sigma_keeps_the_scale_of_the_importance(axis: Axis) -> None:
    """Spec 2.3: a global budget compares sigma over matrices, so no normalisation may be left in it."""
    weight = draw(6, 9)
    importance = importance_of(weight, axis)
    assert importance is not None
    base = weighted_svd(weight, importance, axis)
    for factor in (1e-12, 4.0, 1e12):
        rows, *columns = importance if isinstance(importance, tuple) else (importance,)
        scaled = (rows * factor, columns[0] * factor) if columns else rows * factor
        whole = weighted_svd(weight, scaled, axis)
        torch.testing.assert_close(whole.sigma, base.sigma * (factor if axis == "both" else factor**0.5))
        torch.testing.assert_close(torch.mm(*whole.factors(3)), torch.mm(*base.factors(3)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axis", AXES)
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
@pytest.mark.parametrize("axis", AXES)
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
    eigh = Mock(wraps=torch.linalg.eigh)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    monkeypatch.setattr(module, "GRAM_FROM", min(shape))
    gram = weighted_svd(weight, importance, nested(axis))
    assert [matrix.shape for (matrix,), _ in eigh.call_args_list] == [(min(shape), min(shape))]
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
