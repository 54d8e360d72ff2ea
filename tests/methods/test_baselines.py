"""Truncated SVD as a method: the factors of the dense net, nothing else."""

import torch
from helpers import begun

from lit_compress.methods import SVD
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net


def test_factors_are_the_truncated_svd(dense):
    """Eqs. 1-2 of LPAF: the product is the best of its rank, and the left factor has sigma."""
    net, method = load_net(dense), begun(SVD(backbone="unused", density=0.5), dense)
    for site in find_sites(net):
        weight, layer = net.get_submodule(site.name).weight.detach().double(), method.net.get_submodule(site.name)
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        k = layer.rank
        assert torch.allclose((layer.left @ layer.right).double(), u[:, :k] * s[:k] @ vh[:k], atol=1e-6)
        left, right = layer.left.detach().double().norm(dim=0), layer.right.detach().double().norm(dim=1)
        assert torch.allclose(left, s[:k], atol=1e-5) and torch.allclose(right, torch.ones_like(right), atol=1e-5)


def test_fixed_rank(dense):
    method = begun(SVD(backbone="unused", rank=7), dense)
    assert {method.net.get_submodule(s.name).rank for s in find_sites(method.net)} == {7}
