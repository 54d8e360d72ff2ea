"""Truncated SVD as a method: the factors of the dense net, nothing else."""

from __future__ import annotations

import pytest
import torch

from lit_compress.methods import SVD
from lit_compress.methods.svd import Factorized
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net


def build(dense, side="out", **arguments):
    method = SVD(backbone="unused", retrain=Factorized(sigma_side=side), **arguments)
    method.prepare(method.stages()[-1], 0, dense, None)
    method.configure_model()
    return method


@pytest.mark.parametrize("side", ["out", "in", "balanced"])
def test_factors_are_the_truncated_svd(dense, side):
    """Eqs. 1-2 of LPAF: the product is the best of its rank, and sigma stands where it was asked for."""
    net, method = load_net(dense), build(dense, side, density=0.5)
    for site in find_sites(net):
        weight, layer = net.get_submodule(site.name).weight.detach().double(), method.net.get_submodule(site.name)
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        k = layer.rank
        assert torch.allclose((layer.left @ layer.right).double(), u[:, :k] * s[:k] @ vh[:k], atol=1e-6)
        left, right = layer.left.detach().double().norm(dim=0), layer.right.detach().double().norm(dim=1)
        on_left, on_right = {"out": (s, s**0), "in": (s**0, s), "balanced": (s**0.5, s**0.5)}[side]
        assert torch.allclose(left, on_left[:k], atol=1e-5) and torch.allclose(right, on_right[:k], atol=1e-5)


def test_fixed_rank(dense):
    method = build(dense, rank=7)
    assert {method.net.get_submodule(s.name).rank for s in find_sites(method.net)} == {7}
