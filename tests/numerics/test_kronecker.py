"""The decomposition under whole second moments against a brute-force minimiser, and its special cases."""

from __future__ import annotations

import pytest
import torch
from moments import draw, estimated_loss, moment
from torch import Tensor

from lit_compress.numerics.decompose import Axis, Importance, SigmaSide, decompose, weighted_error
from lit_compress.numerics.kronecker import (
    KroneckerSVD,
    Moment,
    centred,
    change_of_bias,
    corrected_bias,
    damped_root,
    kronecker_svd,
    row_costs,
)
from lit_compress.utils.errors import UserError

SHAPES = [(6, 9), (9, 6), (7, 7)]
NONE = (0.0, 0.0)  # no damping


def product(found: KroneckerSVD, rank: int) -> Tensor:
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
    found = kronecker_svd(weight, a, g, damping=NONE)
    approx = product(found, rank)
    loss = estimated_loss(weight, approx, a, g)
    assert loss == pytest.approx(minimised(weight, rank, a, g), rel=1e-6)
    assert loss == pytest.approx(float(loss_by_loops(weight - approx, a, g)), rel=1e-9)
    assert loss == pytest.approx(found.loss(rank), rel=1e-9)
    left, right = decompose(weight, rank)
    assert loss < 0.99 * estimated_loss(weight, left @ right, a, g)


@pytest.mark.parametrize("shape", SHAPES)
def test_sigma_is_the_loss_of_a_component(shape: tuple[int, int]) -> None:
    weight, a, g = draw(*shape), moment(shape[1], 1), moment(shape[0], 2)
    found = kronecker_svd(weight, a, g, damping=NONE)
    for j, sigma in enumerate(found.sigma):
        assert estimated_loss(weight, found.without(j, j + 1), a, g) == pytest.approx(float(sigma**2), rel=1e-7)
    whole = weight.trace() * 0 + ((g @ weight) * (weight @ a)).sum()
    assert float(found.sigma.square().sum()) == pytest.approx(float(whole))
    assert (found.sigma.diff() <= 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_rank_gives_the_weight_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Also with moments of a few tokens, which only the damping makes invertible."""
    weight, x, d = draw(*shape).to(dtype), draw(3, shape[1], seed=1), draw(3, shape[0], seed=2)
    mean = x.mean(0)
    found = kronecker_svd(weight, x.T @ x / 3, d.T @ d / 3, mean=mean)
    left, right = found.factors(min(shape))
    assert left.dtype == right.dtype == dtype and left.is_contiguous() and right.is_contiguous()
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(left @ right, weight, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_moments_it_is_the_plain_svd(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    for found in (kronecker_svd(weight), kronecker_svd(weight, torch.eye(shape[1]), torch.eye(shape[0]))):
        left, right = decompose(weight, 3)
        torch.testing.assert_close(product(found, 3), left @ right)
    torch.testing.assert_close(kronecker_svd(weight).sigma, torch.linalg.svdvals(weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_diagonal_moments_are_fwsvd(shape: tuple[int, int]) -> None:
    """Diagonal A is axis in, diagonal G axis out, both are both; a whole diagonal matrix is its diagonal."""
    weight, a, g = draw(*shape), draw(shape[1], seed=3).abs() + 0.1, draw(shape[0], seed=4).abs() + 0.1
    cases: list[tuple[Moment, Moment, Importance, Axis]]
    cases = [(a, None, a, "in"), (None, g, g, "out"), (a, g, (g, a), "both")]
    for inputs, gradients, importance, axis in cases:
        left, right = decompose(weight, 3, importance, axis)
        expected = left @ right
        found = kronecker_svd(weight, inputs, gradients, damping=NONE)
        torch.testing.assert_close(product(found, 3), expected, rtol=1e-7, atol=1e-7)
        assert found.loss(3) == pytest.approx(weighted_error(weight, expected, importance, axis) ** 2)
        assert estimated_loss(weight, expected, inputs, gradients) == pytest.approx(found.loss(3))
        whole = kronecker_svd(
            weight, *(None if m is None else torch.diag(m) for m in (inputs, gradients)), damping=NONE
        )
        torch.testing.assert_close(whole.sigma, found.sigma)


def test_a_stack_is_one_matrix_under_a_block_diagonal_moment() -> None:
    weights = [draw(5, 8, seed=1), draw(3, 8, seed=2), draw(4, 8, seed=3)]
    a, gs = moment(8, 4), [moment(5, 5), moment(3, 6), moment(4, 7)]
    found = kronecker_svd(torch.cat(weights), a, gs, sizes=[5, 3, 4], damping=NONE)
    single = kronecker_svd(torch.cat(weights), a, torch.block_diag(*gs), damping=NONE)
    torch.testing.assert_close(found.sigma, single.sigma)
    assert found.sizes == (5, 3, 4)
    left, right = found.factors(3)
    torch.testing.assert_close(left @ right, product(single, 3))
    parts = [estimated_loss(w, p @ right, a, g) for w, p, g in zip(weights, left.split(found.sizes), gs, strict=True)]
    assert sum(parts) == pytest.approx(found.loss(3))
    plain = kronecker_svd(torch.cat(weights), a, sizes=[5, 3, 4], damping=NONE)
    torch.testing.assert_close(plain.sigma, kronecker_svd(torch.cat(weights), a, damping=NONE).sigma)


def test_centring() -> None:
    """The mean of the outputs stays, no other right bias is better, and the loss of the outputs is (M) under C."""
    x = draw(50, 6, seed=1) @ draw(6, 6, seed=2) + 3 * draw(6, seed=3)
    weight, bias, g = draw(5, 6), draw(5, seed=4), moment(5, 5)
    a, m = x.T @ x / 50, x.mean(0)
    found = kronecker_svd(weight, a, g, mean=m, damping=NONE)
    approx = product(found, 2)
    new = bias + change_of_bias(weight, approx, m)
    torch.testing.assert_close(new, corrected_bias(bias, weight, approx, m))
    torch.testing.assert_close((x @ approx.T + new).mean(0), (x @ weight.T + bias).mean(0))
    error = x @ (weight - approx).T + bias - new
    measured = float((error @ g * error).sum(1).mean())
    assert measured == pytest.approx(found.loss(2)) == estimated_loss(weight, approx, a, g, m)
    assert measured < kronecker_svd(weight, a, g, damping=NONE).loss(2)
    covariance = (x - m).T @ (x - m) / 50
    torch.testing.assert_close(centred(a, m), covariance)
    torch.testing.assert_close(centred(a.diagonal(), m), covariance.diagonal())
    changed = corrected_bias(bias.float(), weight, approx, m, 2 * m)
    torch.testing.assert_close(changed, (bias + weight @ m - 2 * approx @ m).float())


@pytest.mark.parametrize("side", ["out", "in", "balanced"])
def test_the_side_of_the_singular_values(side: SigmaSide) -> None:
    weight, a = draw(5, 6), moment(6, 1)
    found = kronecker_svd(weight, a, moment(5, 2), sigma_side=side)
    torch.testing.assert_close(product(found, 3), product(kronecker_svd(weight, a, moment(5, 2)), 3))
    left, right = found.factors(5)
    lengths = left.norm(dim=0), right.norm(dim=1)
    ones = torch.ones(5).double()
    torch.testing.assert_close(lengths[1] if side == "out" else lengths[0], {"balanced": lengths[1]}.get(side, ones))


def test_the_scale_of_the_loss_has_no_influence() -> None:
    weight, a, g = draw(5, 6), moment(6, 1), moment(5, 2)
    plain, scaled = kronecker_svd(weight, a, g), kronecker_svd(weight, a, 64 * g)
    torch.testing.assert_close(product(plain, 2), product(scaled, 2))
    torch.testing.assert_close(8 * plain.sigma, scaled.sigma)


def test_damping_is_said() -> None:
    a, g = moment(6, 1), moment(5, 2)
    found = kronecker_svd(draw(5, 6), a, g, damping=(0.1, 0.2))
    assert found.added == pytest.approx((0.1 * float(a.diagonal().mean()), 0.2 * float(g.diagonal().mean())))
    root = damped_root(a, 0.1)
    assert root.factor is not None
    torch.testing.assert_close(root.factor @ root.factor.T, a + root.added * torch.eye(6))
    rows = draw(3, 6, seed=9)
    for one in (root, damped_root(a.diagonal(), 0.1), damped_root(None, 0.1)):
        torch.testing.assert_close(one.divide(one.times(rows)), rows)
    assert damped_root(None, 0.1).added == 0


def test_a_matrix_of_low_rank_stays_finite() -> None:
    weight = draw(7, 2) @ draw(2, 6, seed=1)
    found = kronecker_svd(weight, moment(6, 1), moment(7, 2))
    for rank in (2, 4, 6):
        torch.testing.assert_close(product(found, rank), weight)
    zero = kronecker_svd(torch.zeros(4, 3), moment(3, 1))
    assert product(zero, 2).eq(0).all() and zero.sigma.eq(0).all()


def test_fewer_components() -> None:
    weight, a, g = draw(5, 6), moment(6, 1), moment(5, 2)
    found, whole = kronecker_svd(weight, a, g, components=2), kronecker_svd(weight, a, g)
    assert found.left.shape == (5, 2) and len(found.sigma) == 5
    torch.testing.assert_close(product(found, 2), product(whole, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": torch.full((6, 6), torch.nan)}, "key: the second moments of its inputs are inf or NaN"),
        ({"gradients": torch.zeros(5, 5)}, "key: all its gradients are zero"),
        (
            {"inputs": torch.ones(6, 6), "damping": NONE},
            "key: .* inputs are singular with damping 0.0; give more examples",
        ),
        ({"inputs": torch.tensor([1.0, 1, 1, 1, 1, 0]), "damping": NONE}, "inputs are singular with damping 0.0"),
        ({"weight": torch.full((5, 6), torch.inf)}, "key: holds inf or NaN"),
    ],
)
def test_errors(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        kronecker_svd(**{"weight": draw(5, 6), "name": "key", **changes})
    with pytest.raises(UserError, match="key: rank 6 does not fit"):
        kronecker_svd(draw(5, 6), name="key").factors(6)


@pytest.mark.parametrize("with_mean", [False, True])
def test_the_cost_of_a_row_is_what_the_matrix_without_it_loses(with_mean: bool) -> None:
    matrix, a, g = draw(6, 9), moment(9, 1), moment(6, 2)
    mean = a.mean(0) / 9 if with_mean else None
    inputs = centred(a, mean)
    assert inputs is not None
    for i, cost in enumerate(row_costs(matrix, a, g, mean)):
        without = matrix.clone()
        without[i] = 0
        assert float(cost) == pytest.approx(loss_by_loops(matrix - without, inputs, g).item(), rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [None, draw(9, seed=4) / 50])
def test_moments_that_may_be_overwritten_give_the_same(shape: tuple[int, int], mean: Tensor | None) -> None:
    weight, sizes = torch.cat([draw(*shape), draw(3, shape[1], seed=5)]), (shape[0], 3)
    mean = None if mean is None else mean[: shape[1]]
    a, gs = moment(shape[1], 1), [moment(shape[0], 2), moment(3, 3)]
    before = [x.clone() for x in (a, *gs)]
    kept = kronecker_svd(weight, a, gs, sizes=sizes, mean=mean)
    for x, was in zip((a, *gs), before, strict=True):
        assert torch.equal(x, was)
    found = kronecker_svd(weight, a, iter(gs), sizes=sizes, mean=mean, overwrite=True)
    assert found.added == kept.added
    torch.testing.assert_close(found.sigma, kept.sigma, rtol=1e-12, atol=0)
    torch.testing.assert_close(product(found, 3), product(kept, 3), rtol=1e-9, atol=1e-12)
    assert not torch.equal(a, before[0])  # or this test would show nothing


def test_a_root_without_memory_of_its_own() -> None:
    a = moment(6, 1)
    expected, there = damped_root(a, 0.1).factor, a.data_ptr()
    found = damped_root(a, 0.1, overwrite=True).factor
    assert expected is not None and found is not None
    assert found.data_ptr() == there
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
