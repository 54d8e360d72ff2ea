"""The pivot form is the product of the factors with k^2 parameters fewer."""

from __future__ import annotations

import pytest
import torch
from moments import draw, moment

from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.numerics.pivot import independent_rows, pivot_form
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30)])
@pytest.mark.parametrize("rank", [1, 7, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_factors(shape, rank, dtype):
    weight = draw(*shape).to(dtype)
    left, right = kronecker_svd(weight, moment(shape[1], 1), moment(shape[0], 2)).factors(rank)
    form = pivot_form(left, right)
    assert sum(part.numel() for part in (form.right, form.rest)) == rank * (sum(shape) - rank)
    assert form.right.dtype == form.rest.dtype == dtype and sorted(form.order.tolist()) == list(range(shape[0]))
    product = left @ right
    new_left, new_right = form.factors()
    limit = 1e-6 * float(product.abs().max()) * (10 if dtype == torch.float32 else 1e-4)
    torch.testing.assert_close(new_left @ new_right, product, rtol=0, atol=limit)
    rows = torch.cat([form.right, form.rest @ form.right])
    torch.testing.assert_close(rows, product[form.order], rtol=0, atol=limit)


def test_entries_stay_small():
    """Much smaller than with the first rows as pivots; most are at most 1."""
    left, right = draw(200, 20, seed=1), draw(20, 30, seed=2)
    rest = pivot_form(left, right).rest
    first = torch.linalg.solve(left[:20].T, left[20:].T).T
    assert rest.abs().max() < 3 < first.abs().max() and (rest.abs() <= 1).double().mean() > 0.99


def test_columns_of_very_different_lengths():
    """As singular values leave them: what is chosen depends on the space only."""
    left, right = draw(30, 8, seed=1), draw(8, 20, seed=2)
    scale = torch.logspace(0, -8, 8, dtype=torch.float64)
    form, plain = pivot_form(left * scale, right / scale[:, None]), pivot_form(left, right)
    assert torch.equal(form.order, plain.order)
    torch.testing.assert_close(form.rest, plain.rest, rtol=1e-5, atol=1e-5)


def test_pivots_by_the_definition():
    basis = torch.linalg.qr(draw(12, 4)).Q
    left, expected = basis.clone(), []
    for _ in range(4):
        expected.append(int(left.norm(dim=1).argmax()))
        chosen = basis[expected]
        left = basis - basis @ torch.linalg.pinv(chosen) @ chosen
    assert independent_rows(basis).tolist() == expected


def test_errors():
    left = draw(6, 3)
    left[:, 2] = left[:, 0] + left[:, 1]
    with pytest.raises(UserError, match=r"key: .*rank 3 has dependent columns; give a smaller rank"):
        pivot_form(left, draw(3, 5), "key")
    with pytest.raises(UserError, match=r"inf or NaN"):
        pivot_form(left * torch.nan, draw(3, 5))
    with pytest.raises(UserError, match=r"dependent columns"):
        pivot_form(torch.zeros(4, 2), draw(2, 5))
