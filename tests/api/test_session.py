"""A call is independent of the state in which a notebook makes it."""

from __future__ import annotations

import pytest
import torch

from lit_compress.api.session import undisturbed


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_gradients_reach_weights_in_any_mode(mode):
    with mode():
        with undisturbed():
            weight = torch.ones(2, requires_grad=True)
            (2 * weight).sum().backward()
        assert not torch.is_grad_enabled()
    assert weight.grad.tolist() == [2.0, 2.0]
