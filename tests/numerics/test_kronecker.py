"""The decomposition under whole second moments against a brute-force minimiser, and its special cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moments import SHAPES, decompose, draw, estimated_loss, moment, weighted_error
from torch import Tensor

from lit_compress.numerics.decompose import Factorization, Side
from lit_compress.numerics.kronecker import (
    DAMPING,
    centred,
    change_of_bias,
    damped_root,
    kronecker_svd,
)
from lit_compress.utils.errors import UserError


@pytest.fixture(autouse=True)
def undamped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DAMPING:
        monkeypatch.setitem(DAMPING, name, 0.0)


def svd_of(weight: Tensor, inputs: Tensor | None = None, gradients: Any = None, **settings: Any) -> Factorization:
    """Decompose with copies of the moments, which are overwritten."""
    if gradients is not None:
        gradients = [g.clone() for g in (gradients if isinstance(gradients, list) else [gradients])]
    inputs = torch.eye(weight.shape[1]).double() if inputs is None else inputs.clone()
    return kronecker_svd(weight, inputs, gradients, **settings)


def dropped(found: Factorization, rank: int) -> float:
    """Return (M) of the approximation of that rank."""
    return float(found.sigma[rank:].square().sum())


def product(found: Factorization, rank: int) -> Tensor:
    left, right = found.factors(rank)
    return left @ right


def loss_by_loops(error: Tensor, inputs: Tensor, gradients: Tensor) -> Tensor:
    """vec(E)^T (G kron A) vec(E) with vec by rows: equation (M) without a trace."""
    return error.flatten() @ torch.kron(gradients, inputs) @ error.flatten()


def minimised(weight: Tensor, rank: int, inputs: Tensor, gradients: Tensor) -> float:
    """(M) after a descent over left and right from a random start."""
    left, right = draw(len(weight), rank, seed=7).requires_grad_(), draw(rank, weight.shape[1], seed=8).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [left, right], max_iter=300, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        error = weight - left @ right
        loss = ((gradients @ error) * (error @ inputs)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return closure().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_equals_a_brute_force_minimiser(shape: tuple[int, int], rank: int) -> None:
    weight, a, g = draw(*shape), moment(shape[1], 1), moment(shape[0], 2)
    found = svd_of(weight, a, g)
    approx = product(found, rank)
    loss = estimated_loss(weight, approx, a, g)
    assert loss == pytest.approx(minimised(weight, rank, a, g), rel=1e-6)
    assert loss == pytest.approx(float(loss_by_loops(weight - approx, a, g)), rel=1e-9)
    assert loss == pytest.approx(dropped(found, rank), rel=1e-9)
    left, right = decompose(weight, rank)
    assert loss < 0.99 * estimated_loss(weight, left @ right, a, g)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_rank_gives_the_weight_back(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with moments of a few tokens, which only the damping makes invertible."""
    for name in DAMPING:
        monkeypatch.setitem(DAMPING, name, 1e-3)
    weight, x, d = draw(*shape).to(dtype), draw(3, shape[1], seed=1), draw(3, shape[0], seed=2)
    mean = x.mean(0)
    found = svd_of(weight, x.T @ x / 3, d.T @ d / 3, mean=mean)
    left, right = found.factors(min(shape))
    assert left.dtype == right.dtype == dtype and left.is_contiguous() and right.is_contiguous()
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(left @ right, weight, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_diagonal_moments_are_fwsvd(shape: tuple[int, int]) -> None:
    """Diagonal A is axis in, diagonal G axis out."""
    weight, a, g = draw(*shape), draw(shape[1], seed=3).abs() + 0.1, draw(shape[0], seed=4).abs() + 0.1
    cases: list[tuple[Tensor | None, Tensor | None, Tensor, Side]]
    cases = [(torch.diag(a), None, a, "in"), (None, torch.diag(g), g, "out")]
    for inputs, gradients, importance, axis in cases:
        left, right = decompose(weight, 3, importance, axis)
        expected = left @ right
        found = svd_of(weight, inputs, gradients)
        torch.testing.assert_close(product(found, 3), expected, rtol=1e-7, atol=1e-7)
        assert dropped(found, 3) == pytest.approx(weighted_error(weight, expected, importance, axis) ** 2)
        assert estimated_loss(weight, expected, inputs, gradients) == pytest.approx(dropped(found, 3))


def test_a_stack_is_one_matrix_under_a_block_diagonal_moment() -> None:
    weights = [draw(5, 8, seed=1), draw(3, 8, seed=2), draw(4, 8, seed=3)]
    a, gs = moment(8, 4), [moment(5, 5), moment(3, 6), moment(4, 7)]
    found = svd_of(torch.cat(weights), a, gs, sizes=[5, 3, 4])
    single = svd_of(torch.cat(weights), a, torch.block_diag(*gs))
    torch.testing.assert_close(found.sigma, single.sigma)
    left, right = found.factors(3)
    torch.testing.assert_close(left @ right, product(single, 3))
    parts = [estimated_loss(w, p @ right, a, g) for w, p, g in zip(weights, left.split([5, 3, 4]), gs, strict=True)]
    assert sum(parts) == pytest.approx(dropped(found, 3))
    plain = svd_of(torch.cat(weights), a, sizes=[5, 3, 4])
    torch.testing.assert_close(plain.sigma, svd_of(torch.cat(weights), a).sigma)


def test_centring() -> None:
    """The mean of the outputs stays, no other right bias is better, and the loss of the outputs is (M) under C."""
    x = draw(50, 6, seed=1) @ draw(6, 6, seed=2) + 3 * draw(6, seed=3)
    weight, bias, g = draw(5, 6), draw(5, seed=4), moment(5, 5)
    a, m = x.T @ x / 50, x.mean(0)
    found = svd_of(weight, a, g, mean=m)
    approx = product(found, 2)
    new = bias + change_of_bias(weight, approx, m)
    torch.testing.assert_close((x @ approx.T + new).mean(0), (x @ weight.T + bias).mean(0))
    error = x @ (weight - approx).T + bias - new
    measured = float((error @ g * error).sum(1).mean())
    assert measured == pytest.approx(dropped(found, 2)) == estimated_loss(weight, approx, a, g, m)
    assert measured < dropped(svd_of(weight, a, g), 2)
    covariance = (x - m).T @ (x - m) / 50
    torch.testing.assert_close(centred(a, m), covariance)


def test_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a moment with its damping, in the moment's own memory."""
    monkeypatch.setitem(DAMPING, "inputs", 0.1)
    a = moment(6, 1)
    damped = a + 0.1 * a.diagonal().mean() * torch.eye(6)
    root = damped_root(a)
    assert root.data_ptr() == a.data_ptr() and not root.triu(1).any()
    torch.testing.assert_close(root @ root.T, damped)


def test_a_matrix_of_low_rank_stays_finite() -> None:
    weight = draw(7, 2) @ draw(2, 6, seed=1)
    found = svd_of(weight, moment(6, 1), moment(7, 2))
    for rank in (2, 4, 6):
        torch.testing.assert_close(product(found, rank), weight)
    zero = svd_of(torch.zeros(4, 3), moment(3, 1))
    assert product(zero, 2).eq(0).all() and zero.sigma.eq(0).all()


def test_fewer_components() -> None:
    weight, a, g = draw(5, 6), moment(6, 1), moment(5, 2)
    found, whole = svd_of(weight, a, g, components=2), svd_of(weight, a, g)
    assert found.left.shape == (5, 2) and len(found.sigma) == 5
    torch.testing.assert_close(product(found, 2), product(whole, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradients": torch.zeros(5, 5)}, "key: all its gradients are zero"),
        ({"inputs": torch.ones(6, 6)}, "key: .* inputs are singular with damping 0.0; give more examples"),
        ({"inputs": torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]))}, "inputs are singular with damping 0.0"),
        ({"weight": torch.full((5, 6), torch.inf)}, "key: holds inf or NaN"),
    ],
)
def test_errors(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        svd_of(**{"weight": draw(5, 6), "name": "key", **changes})
