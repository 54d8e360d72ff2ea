"""Scores against naive loops, and what they are meant to say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_compress.importance import Weighting, accumulate_first_order_, magnitude, row_importance


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_magnitude() -> None:
    """Invariant 24: UP_zero ranks by |W|."""
    weight = torch.tensor([[-3.0, 2.0], [0.0, -0.5]], dtype=torch.bfloat16, requires_grad=True)
    score = magnitude(weight)
    assert score.dtype == torch.float32 and not score.requires_grad
    assert score.tolist() == [[3.0, 2.0], [0.0, 0.5]]


@pytest.mark.parametrize("form", ["absolute", "signed"])
def test_scores_of_plain_sgd_by_hand(form: str) -> None:
    """Invariant 21: S after n steps is the sum over steps of |g W|, or of -g W."""
    weights = [draw(3, 4, seed=1), draw(2, 5, seed=2)]
    scores = [torch.zeros_like(weight) for weight in weights]
    expected = [[[0.0] * weight.shape[1] for _ in range(weight.shape[0])] for weight in weights]
    for step in range(4):
        grads = [draw(*weight.shape, seed=10 + 7 * step + n) for n, weight in enumerate(weights)]
        for weight, grad, table in zip(weights, grads, expected, strict=True):
            for i in range(weight.shape[0]):
                for j in range(weight.shape[1]):
                    product = float(grad[i, j]) * float(weight[i, j])
                    table[i][j] += abs(product) if form == "absolute" else -product
        accumulate_first_order_(scores, weights, grads, form)  # type: ignore[arg-type]
        for weight, grad in zip(weights, grads, strict=True):
            weight -= 0.1 * grad
    for score, table in zip(scores, expected, strict=True):
        torch.testing.assert_close(score, torch.tensor(table), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [2.0, -2.0])
def test_sign_says_whether_growing_helps(target: float) -> None:
    """Invariant 24: (w - a)^2 / 2 falls as |w| grows iff a lies beyond w; only then is S positive."""
    weight = torch.tensor([0.5], requires_grad=True)
    score, absolute = torch.zeros(1), torch.zeros(1)
    (0.5 * (weight - target) ** 2).sum().backward()
    accumulate_first_order_([score], [weight], [weight.grad], "signed")
    accumulate_first_order_([absolute], [weight], [weight.grad], "absolute")
    assert (score.item() > 0) == (target > 0)
    assert absolute.item() == abs(score.item()) > 0


def test_one_big_batch_is_not_its_parts() -> None:
    """Invariant 21: the mean gradient of two halves, not the sum of their products."""
    weight, first, second = draw(3, 3, seed=1), draw(3, 3, seed=2), draw(3, 3, seed=3)
    whole, parts = torch.zeros(3, 3), torch.zeros(3, 3)
    accumulate_first_order_([whole], [weight], [(first + second) / 2])
    for half in (first, second):
        accumulate_first_order_([parts], [weight], [half])
    torch.testing.assert_close(whole, ((first + second) / 2 * weight).abs())
    assert not torch.allclose(whole, parts)


@pytest.mark.parametrize("form", ["absolute", "signed"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_broken_gradient_changes_nothing(form: str, bad: float) -> None:
    """Invariant 22: an inf or NaN anywhere leaves every score as it was; large finite ones do not."""
    weights = [draw(3, 4, seed=1), torch.zeros(2, 2)]
    scores = [draw(3, 4, seed=2), draw(2, 2, seed=3)]
    before = [score.clone() for score in scores]
    grads = [draw(3, 4, seed=4), draw(2, 2, seed=5)]
    grads[1][1, 0] = bad  # where W is 0: 0 * inf must not slip in either
    applied = accumulate_first_order_(scores, weights, grads, form)  # type: ignore[arg-type]
    assert applied.shape == () and not applied
    assert all(torch.equal(a, b) for a, b in zip(scores, before, strict=True))
    grads[1][1, 0] = -3e38
    assert accumulate_first_order_(scores, weights, grads, form)  # type: ignore[arg-type]
    assert not torch.equal(scores[0], before[0])


def test_broken_shard_elsewhere() -> None:
    """Invariant 22 on shards: this rank skips because another one saw an inf."""
    score, weight, grad = torch.zeros(2, 2), draw(2, 2, seed=1), draw(2, 2, seed=2)
    assert not accumulate_first_order_([score], [weight], [grad], reduce=lambda count: count.add_(1))
    assert not score.any()
    assert accumulate_first_order_([score], [weight], [grad], reduce=lambda count: None)


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
    assert accumulate_first_order_(scores, [weight, weight], [None, None])


def test_pruned_weights_keep_their_score() -> None:
    """Invariant 23: W = 0 adds nothing, whatever its gradient."""
    weight = draw(4, 4, seed=1)
    weight[1:3] = 0.0
    score = draw(4, 4, seed=2)
    before = score.clone()
    accumulate_first_order_([score], [weight], [draw(4, 4, seed=3)])
    assert torch.equal(score[1:3], before[1:3]) and not torch.equal(score, before)


def naive_row(scores: list[float], weights: list[float], weighting: Weighting, threshold: float) -> float:
    if weighting == "none":
        return 1.0
    total = 0.0
    for score, weight in zip(scores, weights, strict=True):
        alive = weight != 0
        total += {
            "scores": max(score, 0.0) * alive,
            "scores_abs": abs(score),
            "scores_raw": score,
            "scores_all": max(score, 0.0),
            "scores_shifted": alive * (score - min(threshold, 0.0)),
            "mask": float(alive),
        }[weighting]
    return total


WEIGHTINGS: list[Weighting] = [
    "scores",
    "scores_abs",
    "scores_raw",
    "scores_all",
    "scores_shifted",
    "mask",
    "none",
]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("threshold", [-0.4, 0.3])
def test_row_importance_is_the_loop(weighting: Weighting, threshold: float) -> None:
    scores, weight = draw(6, 4, seed=1), draw(6, 4, seed=2)
    weight[scores < threshold] = 0.0
    weight[3] = 0.0
    result = row_importance(scores, weight, weighting, torch.tensor(threshold))
    assert result.dtype == torch.float64 and result.shape == (6,)
    threshold32 = float(torch.tensor(threshold))
    expected = [naive_row(s, w, weighting, threshold32) for s, w in zip(scores.tolist(), weight.tolist(), strict=True)]
    assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    if weighting in ("scores", "scores_shifted", "scores_all", "scores_abs"):
        assert (result >= 0).all()


def test_weightings_relate_as_they_should() -> None:
    """Invariant 37: equal nnz per row makes mask a constant; negative row sums separate scores from raw."""
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    scores = torch.tensor([[-3.0, 9.0, 1.0], [5.0, -2.0, 0.5]])
    assert row_importance(scores, weight, "mask").tolist() == [2.0, 2.0]
    assert row_importance(scores, weight, "scores").tolist() == [1.0, 0.5]
    assert row_importance(scores, weight, "scores_raw").tolist() == [7.0, 3.5]
    assert (row_importance(-scores.abs(), weight, "scores") == 0).all()
    assert row_importance(scores, weight, "scores_all").tolist() == [10.0, 5.5]
