"""Second-order compression as a method: its factorization is that of the command, its defaults, its mistakes."""

from __future__ import annotations

import pytest
import torch

from lit_compress.calibration.kronecker import collect_kronecker
from lit_compress.data.datamodule import DataModule
from lit_compress.methods import SecondOrder
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.models.sites import find_sites
from lit_compress.models.storage import load_net
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.utils.errors import UserError


def started(fit, dense, refit=False, **settings):
    """Return the net right after the factorization."""
    seen = {}
    retrain = KroneckerWeighted(epochs=1, learning_rate=1e-12, calibration_examples=60, refit=refit)
    method = SecondOrder(backbone="unused", retrain=retrain, **settings)
    fit(method, "retrain", dense, max_steps=1, teacher=dense, look=lambda _, m: seen.setdefault("net", m.net))
    return seen["net"]


def test_factors_are_the_best_of_their_rank(fit, dense, tiny_backbone, tiny_data):
    """The literal way: moments of the same examples, one decomposition per matrix, the bias of (C)."""
    net = started(fit, dense, density=0.4)
    reference = load_net(dense)
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8, seed=7)
    moments = collect_kronecker(reference, data.calibration_dataloader(60, 7), "classification", seed=7)
    ranks = {}
    for site in find_sites(net):
        layer, old, found = net.get_submodule(site.name), reference.get_submodule(site.name), moments[site.name]
        if isinstance(layer, torch.nn.Linear):
            continue
        svd = kronecker_svd(old.weight, found.inputs(), found.gradients(), mean=found.mean)
        left, right = svd.factors(layer.rank)
        assert torch.allclose(layer.left @ layer.right, left @ right, atol=1e-5)
        assert torch.allclose(layer.bias, old.bias + svd.bias_change(layer.rank), atol=1e-5)
        ranks[site.name] = layer.rank
    assert len(set(ranks.values())) > 1


def test_refit_changes_left_factors_and_biases_only(fit, dense):
    """tests/calibration/test_sequential.py has what they become."""
    plain, refitted = (started(fit, dense, density=0.4, refit=refit).state_dict() for refit in (False, True))
    changed = {name for name in plain if not torch.allclose(plain[name], refitted[name], atol=1e-4)}
    assert {name.rpartition(".")[2] for name in changed} == {"left", "bias"}


def test_defaults():
    method = SecondOrder(backbone="unused")
    assert (method.ranks.density, method.ranks.allocation, method.retrain.weighting) == (0.25, "global", "kfac")
    assert method.distillation.on and method.distillation.alpha_layers > 0
    assert SecondOrder(backbone="unused", rank=7).ranks.rank == 7


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"model\.density 0\.5, model\.rank 3: only one"):
        SecondOrder(backbone="x", density=0.5, rank=3)
    with pytest.raises(UserError, match=r"retrain\.labels: 'exact' needs one distribution per example, span_qa"):
        SecondOrder(backbone="x", task="squad", retrain=KroneckerWeighted(labels="exact"))
