"""ITP inside a real fit: the rows of W itself, and what is left of the net."""

from __future__ import annotations

import pytest
import torch
from tiny import make_batch
from torch import nn

from lit_compress.export.fuse import compact
from lit_compress.layers import LowRankSparseLinear
from lit_compress.methods import ITP
from lit_compress.models import accounting as budget
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.stages.rows import RowPruning, RowSparsePruning


def itp(density=0.3):
    return ITP(backbone="unused", density=density, prune=RowPruning(epochs=2, learning_rate=3e-3, interval=3))


def layers(net):
    return {site.name: net.get_submodule(site.name) for site in find_sites(net)}


def logits(net):
    batch = make_batch()
    with torch.no_grad():
        return net.eval()(input_ids=batch["input_ids"] % 20, attention_mask=batch["attention_mask"]).logits


def test_prunes_the_weight_itself(dense):
    method = itp()
    method.prepare(method.stages()[-1], 0, dense, None)
    method.configure_model()
    assert torch.equal(logits(method.net), logits(load_net(dense)))
    for layer, linear in zip(layers(method.net).values(), layers(load_net(dense)).values(), strict=True):
        assert layer.rank == 0 and layer.left is None and torch.equal(layer.sparse, linear.weight)
    method.stage.set_total_steps(100)
    assert method.stage.budget.final == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize("density", [0.1, 0.3])
def test_rows_and_export(fit, dense, density):
    """What is stored has the density up to one row with its column, and is the same function."""
    method = fit(itp(density), "prune", dense)
    asked = density * budget.dense_site_params(method.net)
    assert asked - 64 < budget.count_params(compact(method.net)).sites <= asked + 0.5
    with torch.no_grad():
        for name, layer in layers(method.net).items():
            layer.bias.normal_(std=0.3)  # constants worth folding
            if name.endswith("intermediate.dense"):
                layer.sparse[:7] = 0
            if name.endswith("value"):
                layer.sparse[8:16] = 0
    fused = compact(method.net)
    assert torch.allclose(logits(fused), logits(method.net), atol=1e-5)
    assert budget.density(fused) == budget.stored_density(fused) < budget.density(method.net)
    names = [name for name in layers(fused) if name.endswith("intermediate.dense")]
    assert all(layers(fused)[name].out_features <= 57 for name in names)
    assert not any(isinstance(m, LowRankSparseLinear) for m in fused.modules())


def test_is_losparse_without_factors(fit, dense):
    """Invariant of 2.1: with left = right = 0 the pruner of LoSparse chooses the same rows, step by step."""
    rows = []

    class Zero(RowSparsePruning):
        def begin(self, net, method, structure):
            net = super().begin(net, method, structure)
            for layer in layers(net).values():
                rank = 2
                layer.rank = rank
                layer.left = nn.Parameter(torch.zeros(layer.out_features, rank), requires_grad=False)
                layer.right = nn.Parameter(torch.zeros(rank, layer.in_features), requires_grad=False)
            return net

    for stage in (RowSparsePruning, Zero):
        method = itp()
        fixed = stage(method.prune, 0.3)
        method.stages = lambda fixed=fixed: [fixed]
        fit(method, "prune", dense)
        rows.append([layer.sparse.detach().clone() for layer in layers(method.net).values()])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
