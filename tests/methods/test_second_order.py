"""Second-order compression as a method: its factorization is that of the command, its defaults, its mistakes."""

import pytest
import torch
from helpers import started
from in_memory import collect_kronecker
from tiny import make_net

from lit_compress.data.datamodule import DataModule
from lit_compress.layers import LowRankEmbedding
from lit_compress.methods import SecondOrder
from lit_compress.methods.second_order import KroneckerWeighted
from lit_compress.models.accounting import whole_density
from lit_compress.models.sites import find_sites, shared_inputs
from lit_compress.models.storage import load_net
from lit_compress.numerics.kronecker import kronecker_svd
from lit_compress.utils.errors import UserError


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


def test_scope_all_meets_the_density_of_the_whole_net(fit, dense):
    """The table is factorized with the matrices; what stays as it was counts, too."""
    net = started(fit, second_order(density=0.25, scope="all"), dense, teacher=dense)
    reference = load_net(dense)
    table, old = net.bert.embeddings.word_embeddings, reference.bert.embeddings.word_embeddings
    assert isinstance(table, LowRankEmbedding) and table.left.shape == (old.num_embeddings, table.rank)
    assert 0.23 < whole_density(net) <= 0.25
    assert any(hasattr(net.get_submodule(site.name), "rank") for site in find_sites(net))
    weight = table.left @ table.right
    used = torch.randperm(len(weight))[:5]
    assert (weight - old.weight)[used].norm() < old.weight[used].norm()


def test_scope_all_is_refused_where_it_cannot_be(dense):
    net = load_net(dense)
    with pytest.raises(UserError, match=r"model\.scope: 'all' needs a density"):
        SecondOrder(backbone="x", rank=3, scope="all")
    with pytest.raises(UserError, match=r"model\.scope: 'all' needs one budget .* nearest: global"):
        SecondOrder(backbone="x", scope="all", allocation="uniform")
    for changes, message in (
        ({"weighting": "fisher"}, r"needs whole second moments.*'fisher'.*nearest: blocks"),
        (
            {"removes": "structures"},
            r"retrain\.removes: 'structures' counts the blocks' matrices; nearest with scope all: comp",
        ),
    ):
        method = SecondOrder(backbone="x", scope="all", retrain=KroneckerWeighted(**changes))
        with pytest.raises(UserError, match=message):
            method.stages()[-1].check(net)
    with pytest.raises(UserError, match=r"model\.density: 0\.01 of the model .* one component of each .* make 0\.\d"):
        SecondOrder(backbone="x", scope="all", density=0.01).stages()[-1].check(net)
    with pytest.raises(UserError, match=r"token embeddings of 'qwen3' have other uses .* nearest: blocks"):
        SecondOrder(backbone="x", scope="all").rule.check(make_net("qwen3", "wikitext2"))


def test_defaults():
    method = SecondOrder(backbone="unused")
    assert (method.rule.density, method.rule.allocation, method.retrain.weighting) == (0.25, "global", "kfac")
    assert method.distillation.on and method.distillation.alpha_layers > 0
    assert SecondOrder(backbone="unused", rank=7).rule.rank == 7


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"model\.density 0\.5, model\.rank 3: only one"):
        SecondOrder(backbone="x", density=0.5, rank=3)
    with pytest.raises(UserError, match=r"retrain\.labels: 'exact' needs one distribution per example, span_qa"):
        SecondOrder(backbone="x", task="squad", retrain=KroneckerWeighted(labels="exact"))
