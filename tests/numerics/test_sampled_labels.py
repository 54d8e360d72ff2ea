"""Drawn and exact labels: sums over classes by autograd, frequencies, and no dependence on the batch."""

import pytest
import torch
from moments import draw
from torch.nn import functional as F

from lit_compress.numerics.sampled_labels import draw_labels, fisher_loss, softmax_fisher_root


def outer(weight, x, losses):
    """Sum of g g^T over losses; x is one example."""
    grads = [torch.autograd.grad(loss, weight, retain_graph=True)[0].flatten() for loss in losses]
    return sum(g[:, None] * g for g in grads)


def test_exact_is_the_sum_over_the_classes():
    weight, x = draw(2, 4).requires_grad_(), draw(1, 4, seed=1)
    logits = x @ weight.T
    found = [fisher_loss(logits, "classification", "exact")]
    expected = 0
    for c, p in enumerate(logits[0].softmax(-1).detach()):
        expected = expected + p * outer(weight, x, [F.cross_entropy(logits, torch.tensor([c]))])
    torch.testing.assert_close(outer(weight, x, found), expected)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_root_of_the_softmax(scale):
    """Also where some probabilities are zero."""
    p = (scale * draw(6, 2)).softmax(-1)
    root = softmax_fisher_root(p)
    torch.testing.assert_close(
        root[:, :, None] * root[:, None], torch.diag_embed(p) - p[:, :, None] * p[:, None], rtol=1e-7, atol=1e-15
    )
    single = softmax_fisher_root(p.float())
    assert single.dtype == torch.float32 and single.isfinite().all()


def test_drawn_labels_follow_the_distribution():
    p = torch.tensor([0.6, 0.3, 0.0, 0.1])
    drawn = draw_labels(p.log().expand(4000, 4), torch.arange(4000))
    share = F.one_hot(drawn, 4).double().mean(0)
    torch.testing.assert_close(share, p.double(), rtol=0, atol=0.03)
    assert share[2] == 0
    within = draw_labels(p.log().expand(1, 4000, 4), torch.tensor([5]))  # positions of one example
    torch.testing.assert_close(F.one_hot(within[0], 4).double().mean(0), p.double(), rtol=0, atol=0.03)


def test_draws_do_not_depend_on_the_batch():
    logits, index = draw(5, 7, 4), torch.tensor([3, 11, 0, 7, 2])
    drawn = draw_labels(logits, index, seed=1)
    assert drawn.shape == (5, 7) and drawn.dtype == torch.int64
    order = torch.tensor([4, 2, 0])
    assert torch.equal(draw_labels(logits[order], index[order], seed=1), drawn[order])
    padded = F.pad(logits, (0, 0, 0, 20))
    assert torch.equal(draw_labels(padded, index, seed=1)[:, :7], drawn)
    classes = F.pad(logits, (0, 5), value=-1e4)  # as the logits of spans are padded
    assert torch.equal(draw_labels(classes, index, seed=1), drawn)
    assert not torch.equal(draw_labels(logits, index, seed=2), drawn)
    assert not torch.equal(draw_labels(logits, index + 1, seed=1), drawn)


def test_the_loss_is_a_sum_over_examples_and_their_labels():
    logits = draw(3, 5, 4)
    counted = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    index = torch.arange(3)
    found = fisher_loss(logits, "classification", "drawn", counted=counted, index=index, seed=4)
    drawn = draw_labels(logits, index, 4)
    expected = -logits.log_softmax(-1).gather(-1, drawn[..., None])[..., 0][counted].sum()
    torch.testing.assert_close(found, expected)


def test_regression():
    logits = draw(3, 1).requires_grad_()
    for choice in ("drawn", "exact"):
        loss = fisher_loss(logits, "regression", choice)
        assert torch.autograd.grad(loss, logits)[0].eq(1).all()


def test_unknown_labels_and_exact_ones_of_three_classes_are_no_loss():
    for choice, classes in (("draw", 2), ("exact", 3)):
        with pytest.raises(AssertionError):
            fisher_loss(draw(2, classes), "classification", choice, index=torch.arange(2))
