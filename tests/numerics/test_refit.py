"""The refit of left factors and columns behind changed inputs, against least squares on the tokens."""

from __future__ import annotations

import pytest
import torch
from moments import draw, moment

from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.numerics.refit import refit_left
from lit_compress.utils.errors import UserError


def tokens():
    """x of the dense net, x' of the compressed one; A', B; W."""
    x = draw(60, 8, seed=1) @ draw(8, 8, seed=2)
    new = x + 0.3 * draw(60, 8, seed=3)
    return x, new, new.T @ new / 60, x.T @ new / 60, draw(5, 8, seed=4)


def test_left_is_the_least_squares_solution():
    x, new, a, b, weight = tokens()
    left, right = kronecker_svd(weight, x.T @ x / 60, moment(5, 5)).factors(3)
    expected = torch.linalg.lstsq(new @ right.T, x @ weight.T).solution.T
    found = refit_left(weight, left, right, a, b, damping=0.0)
    torch.testing.assert_close(found, expected)
    error = [
        (x @ weight.T - new @ (part @ right).T).square().sum()
        for part in (left, refit_left(weight, left, right, a, b), found)
    ]
    assert error[2] <= error[1] < error[0]


def test_nothing_changes_where_the_inputs_are_the_same():
    """Damping draws to the factor that is there, however strong it is."""
    x, _, _, _, weight = tokens()
    a = x.T @ x / 60
    left, right = kronecker_svd(weight, a, damping=(0.0, 0.0)).factors(3)
    for damping in (0.0, 1.0, 1e6):
        found = refit_left(weight.float(), left.float(), right.float(), a, a, damping)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), left, rtol=1e-4, atol=1e-4)
    other = left + draw(*left.shape, seed=6)
    torch.testing.assert_close(refit_left(weight, other, right, a, a, 1e9), other)


def test_errors():
    _, _, a, b, weight = tokens()
    left, right = draw(5, 3), draw(3, 8)
    with pytest.raises(UserError, match=r"key: .* singular with damping 0.0"):
        refit_left(weight, left, right[[0, 0, 0]], a, b, 0.0, "key")
    with pytest.raises(UserError, match=r"inputs are inf or NaN"):
        refit_left(weight, left, right, a * torch.nan, b)
