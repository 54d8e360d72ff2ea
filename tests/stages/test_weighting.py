"""Factorization of a net under its Kronecker factors, against the definitions on plain tensors; whose labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_memory import collect_kronecker
from tiny import make_batch, make_net, write_backbone

from lit_compress.data.datamodule import DataModule
from lit_compress.methods import FWSVD
from lit_compress.models.accounting import stored_density
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.surgery import factorize, stacked_weight
from lit_compress.numerics.kronecker import DAMPING, kronecker_svd
from lit_compress.stages.compression import collected
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import weighted
from lit_compress.stages.weighting import Weighted, calibration_for, labels_of
from lit_compress.tasks.records import Custom, get_task
from lit_compress.utils.errors import UserError


@pytest.fixture
def net():
    return make_net(dropout=0.0, initializer_range=0.2).eval().double()


def batch_of(net, size=6):
    batch = make_batch(size=size)
    return batch | {"index": torch.arange(size)}


def moments_of(net, **settings):
    return collect_kronecker(net, [batch_of(net)], "classification", labels="exact", **settings)


def site_weights(net):
    return {site.name: net.get_submodule(site.name).weight.detach() for site in find_sites(net)}


def logits(net):
    batch = batch_of(net)
    with torch.no_grad():
        return net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_factors_hold_nothing_of_the_components_that_go(net):
    """Else a compressed net would keep all components of which the ranks were chosen."""
    compression, names = Factors(RankRule(0.3, allocation="global"), KFAC), list(site_weights(net))
    measured = {k: v for _, found in compression.measure(net, names, moments_of(net)) for k, v in found.items()}
    ranks = compression.plan(net, measured)
    assert all(ranks[name] < len(measured[f"{name}.right"]) for name in list(ranks)[:3])
    compression.fill(net, ranks, measured)
    for name in ranks:
        for factor in (net.get_submodule(name).left, net.get_submodule(name).right):
            assert factor.untyped_storage().nbytes() == factor.nbytes


@pytest.mark.parametrize("weighting", ["kfac", "inputs"])
def test_a_method_retrains_after_it(weighting, fit, dense):
    """The calibration leaves no gradients, no frozen parameters and no hooks."""
    seen = {}
    retrain = Weighted(epochs=1, learning_rate=1e-9, weighting=weighting, calibration_examples=40)
    method = FWSVD(backbone="unused", density=0.4, allocation="global", retrain=retrain)
    fit(method, "retrain", dense, max_steps=1, look=lambda trainer, module: seen.setdefault("net", module.net))
    assert all(p.requires_grad for p in seen["net"].parameters()) and seen["net"].training
    assert not any(m._forward_hooks for m in seen["net"].modules())


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"retrain\.calibration_examples: 0 is below 1"):
        Weighted(calibration_examples=0)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_stack_is_one_decomposition(net, gradients, monkeypatch):
    """[Wq; Wk; Wv] under A and the block-diagonal G, with the biases of (C)."""
    moments, groups = moments_of(net), stacks(net)
    compression = Factors(RankRule(), Weighted(weighting="kfac" if gradients else "inputs"))

    def factors(name, weight, rank):
        return compression.svd(net, names, weight, dict(moments), rank).factors(rank)

    first, names = next(iter(groups.items()))
    weight = stacked_weight(net, names)
    scale = torch.block_diag(*(moments[n].gradients() for n in names)) if gradients else None
    if gradients:  # the damping is of each block
        for name, part in zip(names, torch.arange(len(scale)).split(len(scale) // 3), strict=True):
            scale[part, part] += DAMPING["gradients"] * moments[name].gradients().diagonal().mean()
    with monkeypatch.context() as patch:
        patch.setitem(DAMPING, "gradients", 0.0)
        outer = scale if scale is None else [scale]
        expected = kronecker_svd(weight, moments[first].inputs(), outer, mean=moments[first].mean)
    assert torch.allclose(compression.svd(net, names, weight, dict(moments), 4).sigma, expected.sigma)
    left, right = factors(first, weight, 4)
    assert torch.allclose(left @ right, torch.mm(*expected.factors(4)), atol=1e-9)
    before = [net.get_submodule(name).bias.clone() for name in names]
    factorize(net, {first: 4}, factors, mean=lambda _: moments[first].mean, stacks=groups)
    after = [net.get_submodule(name).bias for name in names]
    change = (weight - left @ right) @ moments[first].mean
    assert torch.allclose(torch.cat(after) - torch.cat(before), change, atol=1e-9)


def test_a_stack_in_which_a_bias_is_missing_is_not_centred(net):
    moments, (names, others, *_) = moments_of(net), stacks(net).values()
    net.get_submodule(names[1]).bias = None
    for sites in (names, others, names[:1], names[1:2]):
        mean = Factors(RankRule(), KFAC).svd(net, sites, stacked_weight(net, sites), dict(moments), 1).mean
        assert (mean is None) == (names[1] in sites)


@pytest.mark.parametrize("density", [0.5, 0.3, 0.2])
def test_stacks_share_one_budget(net, density):
    moments, groups = moments_of(net), stacks(net)

    rule = RankRule(density, allocation="global", stacked=True)

    def svd(name, rank):
        sites = groups.get(name, (name,))
        return Factors(rule, KFAC).svd(net, sites, stacked_weight(net, sites), dict(moments), rank)

    ranks = rule.allocate(net, lambda name: svd(name, 1).sigma)
    factorize(net, ranks, lambda name, _, rank: svd(name, rank).factors(rank), stacks=rule.stacks(net))
    assert density - 0.03 < stored_density(net) <= density


KFAC = Weighted(weighting="kfac")


@pytest.mark.parametrize(
    ("task", "expected"),
    [("sst2", "exact"), ("mrpc", "exact"), ("mnli", "drawn"), ("stsb", "drawn"), ("wiki_qa", "drawn"),
     ("stsb_embedding", "drawn"), ("conll2003", "drawn"), ("squad", "drawn"), ("xsum", "drawn"),
     ("wikitext2", "drawn")],
)  # fmt: skip
def test_two_classes_have_exact_labels(task, expected):
    assert labels_of(get_task(task)) == expected


def test_the_moments_of_two_classes_have_no_noise(tiny_data, tiny_backbone):
    """Another seed draws no other labels: with all examples the moments are the same; the report says which labels."""
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data))
    data.setup("fit")
    net, rows = make_net("bert", "sst2", dropout=0.0, initializer_range=0.3).eval(), data.train_size()

    def moments(seed, **changes):
        data.seed = seed
        asked = calibration_for(Weighted(weighting="kfac", calibration_examples=rows), data)
        asked = replace(asked, statistic=replace(asked.statistic, **changes))
        ((_, found),) = collected(net, asked, data.record, torch.device("cpu"))
        found = [*found.values()]
        return torch.stack([factors.gradients().diagonal()[:2] for factors in found])

    assert torch.allclose(moments(1), moments(2), rtol=1e-5, atol=0)
    assert not torch.allclose(moments(1, labels="drawn"), moments(2, labels="drawn"), rtol=1e-2, atol=0)
    assert weighted(KFAC, RankRule()).record(data)["labels"] == "exact"


@pytest.mark.parametrize("weighting", ["kfac", "inputs"])
def test_texts_count_once_if_a_vector_is_made_of_each(weighting, tmp_path, tiny_data, tiny_backbone):
    net = write_backbone(tmp_path / "net", "bert", "stsb_embedding")
    (tmp_path / "texts.csv").write_text("text\n" + "a b\n" * 20)
    texts = DataModule("custom", str(net), str(tmp_path / "texts.csv"), custom=Custom("embedding"))
    for data, once in ((texts, True), (DataModule("sst2", str(tiny_backbone), str(tiny_data)), False)):
        asked = calibration_for(Weighted(weighting=weighting), data)
        assert asked.statistic.by_text is once
