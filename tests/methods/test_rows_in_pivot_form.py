"""LoSparse in pivot form: factors and rows meet the density of the file."""

from __future__ import annotations

import pytest
import torch
from test_losparse import build, logits, losparse

from lit_compress.export.fuse import compact
from lit_compress.export.pivot import to_pivot_form
from lit_compress.models import accounting as budget


@pytest.mark.parametrize("density", [0.1, 0.2, 0.4])
def test_the_density_in_pivot_form_is_that_of_the_file(dense, density):
    """Rows and ranks use it up: less than one component of every matrix is left."""
    method = losparse(density)
    method.pivot = True
    stage = build(dense, method).stage
    stage.set_total_steps(100)
    for weight in stage._weights:
        weight.grad = torch.rand_like(weight)
    stage.after_step(method.net, 1)
    stage.after_step(method.net, 100)
    small, expected = compact(method.net), logits(method.net)
    plain, total = budget.count_params(small).sites, stage.budget.total
    to_pivot_form(small)
    assert torch.allclose(logits(small), expected, atol=1e-4)
    stored = budget.count_params(small).sites
    assert 0 <= density * total - stored < (64 if density > 0.1 else 12 * 64) and stored < plain
    if density > 0.1:
        assert stage.status(method.net, 100)["density"] == pytest.approx(stored / total)
