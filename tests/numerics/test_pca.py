"""SP3's projections against their definitions: identities for any data, PCA and DRONE's optimum for the data."""

import pytest
import torch
from torch.nn import functional as F

from lit_compress.numerics import pca
from lit_compress.numerics.pca import centred_axes, principal_axes, query_key_projections, site_projections
from lit_compress.utils.errors import UserError


def orthogonal(d, seed=0):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


def rms(y, eps):
    """Divide by the root mean square: over the original width, no mean subtracted."""
    return y / (y.square().sum(-1, keepdim=True) / y.shape[-1] + eps).sqrt()


def tokens(n=300, d=24, seed=0):
    """Hidden states with a falling spectrum and a common offset."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, dtype=torch.float64, generator=generator) * torch.logspace(1, -2, d, dtype=torch.float64)
    return x @ orthogonal(d, 1).T + torch.randn(d, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_site_is_the_layer_norm_for_any_orthogonal_axes(eps, dtype, tolerance):
    x, d = tokens().to(dtype), 24
    gamma, beta = torch.rand(d).to(dtype) + 0.5, torch.randn(d).to(dtype)
    p_in, p_out = (p.to(dtype) for p in site_projections(orthogonal(d), gamma))
    found = rms(x @ p_in.T, eps) @ p_out.T + beta
    assert torch.allclose(found, F.layer_norm(x, (d,), gamma, beta, eps), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("n", [300, 10])
def test_site_axes_are_the_singular_vectors_without_the_feature_mean(n):
    x, d = tokens(n), 24
    centred = x - x.mean(1, keepdim=True)
    left, sigma, _ = torch.linalg.svd(centred.T, full_matrices=False)
    axes, energies = centred_axes(x.T @ x)
    assert torch.allclose(axes.T @ axes, torch.eye(d, dtype=torch.float64), atol=1e-10)
    energy = (centred @ axes).square().sum(0)
    rank = min(n, d - 1)
    assert torch.allclose(energies, energy, atol=1e-9 * float(energy[0])) and energies[-1] == 0
    assert torch.allclose(energy[:rank].sqrt(), sigma[:rank], rtol=1e-7)
    assert (energy[:-1] >= energy[1:] - 1e-7 * energy[0]).all()
    for k in range(min(rank, 8)):
        assert abs(float(axes[:, k] @ left[:, k])) == pytest.approx(1, abs=1e-7)
    assert torch.allclose(axes[:, -1].abs(), torch.full((d,), d**-0.5, dtype=torch.float64), atol=1e-10)
    p_in, _ = site_projections(axes, torch.ones(d))
    assert p_in[-1].abs().max() < 1e-8
    assert torch.equal(axes, centred_axes(x.T @ x)[0])
    # second moments, not a covariance: a constant over the tokens is not taken away
    shifted = tokens(n) + 100 * torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mean = (shifted - shifted.mean(1, keepdim=True)).mean(0)
    first = centred_axes(shifted.T @ shifted)[0][:, 0]
    assert abs(float(first @ mean / mean.norm())) > 0.99


def test_axes_do_not_depend_on_order_and_chunks():
    x = tokens()
    chunks = sum(part.T @ part for part in x.flip(0).split(37))
    first, second = (principal_axes(g) for g in (x.T @ x, chunks))
    assert torch.allclose(first[1], second[1], rtol=1e-7)
    assert torch.allclose(first[0][:, :10], second[0][:, :10], atol=1e-7)
    assert (first[0].gather(0, first[0].abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("rank", [8, 5, 0])
def test_queries_and_keys_keep_their_scores(rank):
    """P_Q^T P_K = I for a full, a deficient and an all-zero head."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, 200, dtype=torch.float64, generator=generator) for _ in "qk")
    mix = torch.diag((torch.arange(8) < rank).double())
    q, k = orthogonal(8) @ mix @ q, orthogonal(8, 2) @ mix @ k
    query, key = query_key_projections(q @ q.T, k @ k.T)
    assert torch.allclose(query.T @ key, torch.eye(8, dtype=torch.float64), atol=1e-8)
    assert torch.allclose((query @ q).T @ (key @ k), q.T @ k, atol=1e-8)


def test_queries_and_keys_are_balanced_and_their_truncation_is_the_best(monkeypatch):
    monkeypatch.setattr(pca, "RIDGE", 1e-15)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(8, 8, dtype=torch.float64, generator=generator)
    q = mix @ torch.randn(8, 200, dtype=torch.float64, generator=generator)
    k = mix.T @ torch.randn(8, 90, dtype=torch.float64, generator=generator)
    query, key = query_key_projections(q @ q.T, k @ k.T)
    sigma = torch.linalg.svdvals(q.T @ k)[:8]
    for projection, x in ((query, q), (key, k)):
        assert torch.allclose((projection @ x) @ (projection @ x).T, torch.diag(sigma), atol=1e-8 * float(sigma[0]))
    for rank in (1, 3, 7):
        error = (q.T @ k - (query[:rank] @ q).T @ (key[:rank] @ k)).norm()
        assert float(error) == pytest.approx(float(sigma[rank:].norm()), rel=1e-8)


def test_values_come_back():
    x = torch.randn(3, 8, 50, dtype=torch.float64)
    axes, energy = principal_axes(x @ x.mT)
    assert torch.allclose(axes @ axes.mT, torch.eye(8, dtype=torch.float64).expand(3, 8, 8), atol=1e-8)
    assert (energy[:, :-1] >= energy[:, 1:]).all()  # the l-th direction of every head is its l-th best


def test_activations_that_are_not_finite():
    with pytest.raises(UserError, match="inf or NaN"):
        principal_axes(torch.full((3, 3), torch.nan))
