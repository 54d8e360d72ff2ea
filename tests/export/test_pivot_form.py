"""The pivot form of an export: the outputs of the factors, k^2 parameters fewer, loaded without this package."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import logits
from tiny import ALL, TINY, make_net
from torch import nn

from lit_compress.export import fuse as fuse_module
from lit_compress.export.check import check_export
from lit_compress.export.fuse import compact, fuse, merged
from lit_compress.export.modelling import write_model
from lit_compress.export.pivot import check_pivot, pivot_sites, to_pivot_form
from lit_compress.export.program import write_program
from lit_compress.layers import LowRankLinear, LowRankRowsLinear, LowRankSparseLinear, PivotLinear, SizedLinear
from lit_compress.models.accounting import count_params, dense_site_params, density, flops, stored_density
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, factorize
from lit_compress.numerics.decompose import decompose
from lit_compress.stages.rank_rule import RankRule
from lit_compress.utils.errors import UserError


def low_rank(family="bert", share=0.5, stacked=True, layer=LowRankLinear):
    family, settings = ALL[family]
    net, rule = make_net(family, **settings).eval(), RankRule(share, stacked=stacked)
    return factorize(net, rule.allocate(net), lambda _, w, r: decompose(w, r), layer, stacks=rule.stacks(net)).eval()


def pivoted(net):
    net = copy.deepcopy(net)
    return net, to_pivot_form(net)


def saving(net):
    """The sum of rank^2 over matrices, or stacks, in factors."""
    return sum(net.get_submodule(names[0]).rank ** 2 for names in pivot_sites(net))


def reference(left, right, rows=None, index=(), bias=None, x=None):
    """The outputs by loops over the definition of the factors and rows."""
    y = torch.zeros(len(x), len(left), dtype=x.dtype)
    for token in range(len(x)):
        for o in range(len(left)):
            y[token, o] = sum(left[o, r] * (right[r] @ x[token]) for r in range(len(right)))
            y[token, o] += 0 if bias is None else bias[o]
        for row, o in enumerate(index):
            y[token, o] += rows[row] @ x[token]
    return y


class One(nn.Module):
    """A net of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(("out", "rank"), [(7, 1), (7, 4), (4, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_matrix(out, rank, bias):
    torch.manual_seed(0)
    linear = nn.Linear(6, out, bias).double()
    left, right = torch.randn(out, rank).double(), torch.randn(rank, 6).double()
    net, saved = pivoted(One(LowRankLinear.from_factors(linear, left, right)))
    x = torch.randn(3, 6).double()
    assert torch.allclose(net(x), reference(left, right, bias=linear.bias, x=x), atol=1e-12)
    assert net(x[0]).shape == (out,) and net(x[None]).shape == (1, 3, out) and net(x[:0]).shape == (0, out)
    assert saved == {"layer": rank**2} and net.layer.rest.shape == (out - rank, rank)
    found = net.layer.factors()
    assert torch.allclose(found[0] @ found[1], left @ right) and torch.allclose(net.layer.dense(), left @ right)
    assert pivot_sites(net) == []


@pytest.mark.parametrize("index", [[0], [1, 4, 6], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("bias", [True, False])
def test_factors_and_rows(index, bias):
    """Kept rows are whole rows of the matrix: they need no part of the left factor."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 8, bias).double()
    left, right, kept = torch.randn(8, 3).double(), torch.randn(3, 6).double(), torch.zeros(8).bool()
    kept[index] = True
    layer = LowRankRowsLinear.from_rows(left, right, linear.weight, kept, linear.bias)
    net, saved = pivoted(One(layer))
    x = torch.randn(3, 6).double()
    expected = reference(left, right, linear.weight[kept], index, linear.bias, x)
    assert torch.allclose(net(x), expected, atol=1e-12) and torch.allclose(net.layer.dense(), layer.dense())
    assert torch.allclose(torch.matmul(*net.layer.factors()), layer.dense())
    assert saved == {"layer": 3 * 3 + 3 * len(index)}


def test_without_enough_other_rows_factors_stay():
    torch.manual_seed(0)
    linear, kept = nn.Linear(6, 4), torch.tensor([True, False, True, True])
    layer = LowRankRowsLinear.from_rows(torch.randn(4, 2), torch.randn(2, 6), linear.weight, kept, None)
    net, saved = pivoted(One(layer))
    assert saved == {} and isinstance(net.layer, LowRankRowsLinear)
    left = torch.randn(4, 1).repeat(1, 2)
    net, saved = pivoted(One(LowRankLinear.from_factors(linear, left, torch.randn(2, 6))))
    assert saved == {} and isinstance(net.layer, LowRankLinear)


@pytest.mark.parametrize("family", TINY)
def test_every_family(family, tmp_path):
    """Logits, parameters and density follow; so does the net that this package reads back."""
    net = low_rank(family)
    small, saved = pivoted(net)
    assert (logits(small) - logits(net)).abs().max() <= 1e-6 * max(1, float(logits(net).abs().max()))
    assert sum(saved.values()) == saving(net) == count_params(net).sites - count_params(small).sites > 0
    assert density(small) == pytest.approx(density(net) - saving(net) / dense_site_params(net))
    save_net(small, tmp_path)
    again = load_net(tmp_path)
    assert describe(again) == describe(small) and torch.equal(logits(again), logits(small))
    assert stored_density(again) == stored_density(small)


def test_a_stack_has_one_set_of_pivots():
    net, _ = pivoted(low_rank())
    names = next(iter(stacks(make_net()).values()))
    layers = [net.get_submodule(name) for name in names]
    rank, height = layers[0].rank, sum(layer.out_features for layer in layers)
    assert len(names) == 3 and sum(len(layer.rest) for layer in layers) == height - rank
    pivots = torch.cat([layer.order[layer.order < rank] for layer in layers])
    assert sorted(pivots.tolist()) == list(range(rank))
    assert [hasattr(layer, "right") for layer in layers] == [True, False, False]


def test_flops_fall_as_parameters_do():
    net = low_rank()
    small, _ = pivoted(net)
    assert flops(net, 16) - flops(small, 16) == 2 * 16 * saving(net)


@pytest.mark.parametrize(("family", "layer"), [("bert", "stacked"), ("t5", "stacked"), ("bert", "rows")])
def test_the_folder_loads_alone(family, layer, tmp_path):
    net = low_rank(family) if layer == "stacked" else rows_net()
    small, _ = pivoted(net)
    write_model(small, tmp_path)
    assert check_export(small, tmp_path) <= 1e-6
    assert "class PivotLinear(StackedLowRankLinear)" in (tmp_path / "modeling_compressed.py").read_text()


@pytest.mark.slow
def test_as_one_program(tmp_path):
    """What ONNX gets was traced by torch.export."""
    pytest.importorskip("onnxruntime")
    net, _ = pivoted(low_rank("roberta"))
    found = write_program(net, lambda _: {"input_ids": 0, "attention_mask": 0}, tmp_path, "onnx")
    assert found["difference"] <= 1e-4


def rows_net(rank=4, kept=14):
    """A tiny net (32 wide) whose matrices keep their first rows beside factors."""
    net = make_net().eval()
    factorize(net, {s.name: rank for s in find_sites(net)}, lambda _, w, r: decompose(w, r), LowRankSparseLinear)
    with torch.no_grad():
        for site in find_sites(net):
            net.get_submodule(site.name).sparse[kept:] = 0
    return compact(net)


def test_what_is_stored_dense_follows_from_the_pivot_form(monkeypatch):
    """14 of 32 rows and rank 4 are 704 of 1024 parameters as factors, 632 in pivot form."""
    net = rows_net()
    small, _ = pivoted(net)
    squares = {s.name for s in find_sites(net) if s.role in ("q", "k", "v", "o")}
    monkeypatch.setattr(fuse_module, "MERGE", 0.65)
    assert set(merged(net)) == squares and not merged(small)
    assert all(isinstance(fuse(small).get_submodule(name), PivotLinear) for name in squares)
    monkeypatch.setattr(fuse_module, "MERGE", 0.6)
    assert merged(small) == dict.fromkeys(sorted(merged(small)), 632 / 1024) and set(merged(small)) == squares
    stored = fuse(small)
    assert all(isinstance(stored.get_submodule(name), SizedLinear) for name in squares)
    assert torch.allclose(logits(stored), logits(net), atol=1e-5)


def test_a_net_without_factors_is_refused():
    with pytest.raises(UserError, match=r"--pivot is for matrices that are stored as factors; this model has none"):
        check_pivot(make_net())
    check_pivot(low_rank())
