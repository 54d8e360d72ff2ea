"""Grouped truncation, sweep, spectra and ranks against their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import logits
from moments import decompose
from tiny import make_net

from benchmarks.analysis import truncation
from lit_compress.models.surgery import factorize
from lit_compress.numerics.decompose import weighted_svd
from lit_compress.stages.rank_rule import RankRule


@pytest.fixture
def net():
    return make_net(dropout=0.0).eval()


def decomposers(net):
    generator = torch.Generator().manual_seed(2)
    columns = {n: torch.rand(w.shape[1], generator=generator).double() for n, w in truncation.site_weights(net).items()}
    return {
        "none": lambda name, weight: weighted_svd(weight, side="in"),
        "in": lambda name, weight: weighted_svd(weight, columns[name], "in"),
    }


def value(net) -> float:
    return float(logits(net).sum())


def test_groups_are_removed_everywhere_and_put_back(net):
    """Invariant 18: the metric of a group is that of the net without it; afterwards every bit is as before."""
    before = {k: v.clone() for k, v in net.state_dict().items()}
    rows = truncation.grouped_truncation(net, decomposers(net), value)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [(r["weighting"], r["group"]) for r in rows] == [(w, g) for w in ("none", "in") for g in range(1, 11)]
    full = value(net)
    third = {}
    for name, weight in truncation.site_weights(net).items():
        u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
        index = torch.tensor_split(torch.arange(len(s)), 10)[2]
        third[name] = (weight.double() - u[:, index] * s[index] @ vh[index]).float()
    with truncation.replaced(net, third):
        expected = value(net)
    row = rows[2]
    assert row["metric"] == pytest.approx(expected, abs=1e-5) and row["drop"] == pytest.approx(
        full - expected, abs=1e-5
    )
    assert row["relative_drop"] == pytest.approx(row["drop"] / full)
    plain = [r for r in rows if r["weighting"] == "none"]
    sizes = [len(i) for i in torch.tensor_split(torch.arange(32), 10)]
    for r, size in zip(plain, sizes, strict=True):  # of equal matrices: |removed| >= mean sigma, by Cauchy-Schwarz
        assert r["error"] >= r["sigma"] * size**0.5 - 1e-9
    assert all(a["sigma"] > b["sigma"] for a, b in itertools.pairwise(plain))


def test_sweep_ends_at_the_dense_net(net):
    rows = truncation.rank_ratio_sweep(net, decomposers(net), value, (0.2, 1.0))
    assert [r["density"] for r in rows if r["rank_ratio"] == 1.0] == [1.0, 1.0]
    assert all(r["metric"] == pytest.approx(value(net), abs=1e-5) for r in rows if r["rank_ratio"] == 1.0)
    low = next(r for r in rows if r["weighting"] == "none" and r["rank_ratio"] == 0.2)
    ranks = RankRule(rank_ratio=0.2).allocate(net)
    small = factorize(make_net(dropout=0.0).eval(), ranks, lambda _, weight, rank: decompose(weight, rank))
    assert low["metric"] == pytest.approx(value(small), abs=1e-5)
    shapes = [net.get_submodule(n).weight.shape for n in ranks]
    kept = sum(r * sum(s) for r, s in zip(ranks.values(), shapes, strict=True))
    assert low["density"] == pytest.approx(kept / sum(w.numel() for w in truncation.site_weights(net).values()))
