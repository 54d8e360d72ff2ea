"""Second-order compression as a method: its factorization is that of the command, its defaults, its mistakes."""

import pytest
import torch
from helpers import started
from in_memory import collect_kronecker

from lit_compress.data.datamodule import DataModule
from lit_compress.methods import SecondOrder
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.models.sites import shared_inputs
from lit_compress.models.storage import load_net
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.utils.errors import UserError
from lit_compress.utils.fields import check_effects


def second_order(**settings):
    retrain = KroneckerWeighted(epochs=1, learning_rate=1e-12, calibration_examples=60)
    return SecondOrder(backbone="unused", retrain=retrain, **settings)


def test_factors_are_the_best_of_their_rank(fit, dense, tiny_backbone, tiny_data):
    """The literal way: moments of the same examples, one decomposition per matrix or stack, the bias of (C)."""
    net = started(fit, second_order(density=0.4), dense, teacher=dense)
    reference = load_net(dense)
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8, seed=7)
    moments = collect_kronecker(reference, data.calibration_dataloader(60, 7), "classification", labels="exact")
    ranks = {}
    groups = shared_inputs(reference)
    for names in groups:
        layers, old = ([some.get_submodule(name) for name in names] for some in (net, reference))
        if isinstance(layers[0], torch.nn.Linear):
            continue
        found = moments[names[0]]
        whole = torch.cat([layer.weight for layer in old])
        svd = kronecker_svd(
            whole, found.inputs(), [moments[name].gradients() for name in names],
            sizes=[len(layer.weight) for layer in old], mean=found.mean,
        )  # fmt: skip
        left, right = svd.factors(layers[0].rank)
        product = torch.cat([torch.mm(*layer.factors()) for layer in layers])
        assert torch.allclose(product, left @ right, atol=1e-5)
        biases = torch.cat([layer.bias for layer in layers]), torch.cat([layer.bias for layer in old])
        assert torch.allclose(biases[0], biases[1] + (whole - left @ right) @ found.mean.to(left), atol=1e-5)
        ranks[names[0]] = layers[0].rank
    assert len(set(ranks.values())) > 1
    assert any(len(names) > 1 and names[0] in ranks for names in groups)


def test_defaults():
    method = SecondOrder(backbone="unused")
    assert (method.rule.density, method.rule.allocation, method.retrain.weighting) == (0.25, "global", "kfac")
    assert method.distillation.on and method.distillation.alpha_layers > 0
    assert SecondOrder(backbone="unused", rank=7).rule.rank == 7


def test_a_speed_up_takes_heads_and_neurons():
    method = SecondOrder(backbone="x", budget="speedup=3x@eager,1x128")
    assert (method.retrain.removal, method.rule.round_to, method.rule.density) == ("structures", 16, 0.25)
    assert SecondOrder(backbone="x", budget="speedup=3x@cuda,1x128").rule.round_to == 64
    components = KroneckerWeighted(removes="components")
    method = SecondOrder(backbone="x", budget="speedup=3x@eager,1x128", retrain=components)
    assert (method.retrain.removal, method.rule.round_to) == ("components", 1)
    assert SecondOrder(backbone="x", budget="flops=0.3").retrain.removal == "components"
    plain = KroneckerWeighted(weighting="none")
    assert SecondOrder(backbone="x", budget="speedup=3x@eager,1x128", retrain=plain).retrain.removal == "components"
    even = SecondOrder(backbone="x", budget="speedup=3x@eager,1x128", allocation="uniform")
    with pytest.raises(
        UserError, match=r"model\.allocation: uniform has no effect with model\.retrain\.removes struct"
    ):
        check_effects(even)


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"model\.density 0\.5, model\.rank 3: only one"):
        SecondOrder(backbone="x", density=0.5, rank=3)
