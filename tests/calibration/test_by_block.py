"""Calibration block by block is that of the net in memory; files that are missing are made anew."""

from __future__ import annotations

import pytest
import torch
from in_memory import collect_kronecker, estimate_fisher, mean_gradients
from tiny import make_batch, make_net

from lit_compress.calibration.block_states import stored, written
from lit_compress.calibration.by_block import BlockStatistics, Sweeps, calibration_parts, check_disk
from lit_compress.calibration.fisher import DiagonalFisher
from lit_compress.calibration.gradients import Gradients
from lit_compress.calibration.kronecker import Moments
from lit_compress.models.block_net import BlockNet
from lit_compress.models.shards import LazyTensors
from lit_compress.models.sites import find_sites
from lit_compress.tasks import KINDS
from lit_compress.utils.errors import UserError


@pytest.mark.parametrize(
    ("family", "task", "labels"),
    [("bert", "mnli", "exact"), ("llama", "sst2", "drawn"), ("modernbert", "sst2", "true"), ("opt", "sst2", None)],
)
def test_moments_by_blocks_are_those_of_the_whole_net(family, task, labels, tmp_path):
    net, kind = make_net(family, task, initializer_range=0.2).eval(), KINDS["classification"]
    net.save_pretrained(tmp_path / "net")
    batches = [make_batch(4, 9), make_batch(3, 7, seed=2) | {"index": torch.tensor([4, 5, -1])}]
    expected = collect_kronecker(net, batches, "classification", labels=labels, seed=3)
    parts = calibration_parts(kind, batches, labels)
    blocks = BlockNet(net.config, LazyTensors(tmp_path / "net", "model"))
    sweeps = Sweeps(blocks, kind, parts, tmp_path / "work", torch.float32)
    moments, found = BlockStatistics(sweeps, net, Moments(labels, seed=3)), {}
    moments.collect(lambda number: False, lambda number, block, factors: found.update(factors))
    assert found.keys() == expected.keys()
    for name, factors in expected.items():
        assert (found[name].tokens, found[name].examples) == (factors.tokens, factors.examples)
        assert torch.allclose(found[name].mean, factors.mean, atol=1e-6)
        assert torch.allclose(found[name].inputs(), factors.inputs(), rtol=1e-4, atol=1e-6)
        if labels is not None:
            scale = factors.gradients().abs().max()
            assert torch.allclose(found[name].gradients() / scale, factors.gradients() / scale, atol=1e-5), name
    again = {}  # nothing is left of the first block's files
    moments.collect(lambda number: number != 0, lambda number, block, factors: again.update(factors))
    assert len(again) == len(moments.sites[0])
    assert all(torch.equal(factors.inputs(), found[name].inputs()) for name, factors in again.items())


@pytest.mark.parametrize(("family", "task"), [("bert", "mnli"), ("opt", "sst2"), ("llama", "plain_text")])
def test_fisher_information_by_blocks_is_that_of_the_whole_net(family, task, tmp_path):
    net = make_net(family, task, initializer_range=0.2).eval()
    kind = "language_modelling" if task == "plain_text" else "classification"
    net.save_pretrained(tmp_path / "net")
    batches = [make_batch(4, 9), make_batch(3, 7, seed=2) | {"index": torch.tensor([4, 5, -1])}]
    if task == "plain_text":
        batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    names = [site.name for site in find_sites(net)]
    expected = estimate_fisher(net, batches, kind, names)
    parts = calibration_parts(KINDS[kind], batches, "true")
    blocks = BlockNet(net.config, LazyTensors(tmp_path / "net", "model"))
    sweeps = Sweeps(blocks, KINDS[kind], parts, tmp_path / "work", torch.float32)
    moments, found = BlockStatistics(sweeps, net, DiagonalFisher()), {}
    moments.collect(lambda number: False, lambda number, block, fisher: found.update(fisher))
    assert set(found) == set(names) and moments.bytes() > 0
    for name in names:
        for one, other in ((found[name].rows, expected[name].rows), (found[name].columns, expected[name].columns)):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.max())), name


@pytest.mark.parametrize(("family", "task"), [("bert", "mnli"), ("llama", "plain_text")])
def test_gradients_by_blocks_are_those_of_the_whole_net(family, task, tmp_path):
    """Of the sites that are asked for, of all blocks but the first."""
    net = make_net(family, task, initializer_range=0.2).eval()
    kind = "language_modelling" if task == "plain_text" else "classification"
    net.save_pretrained(tmp_path / "net")
    batches = [make_batch(4, 9), make_batch(3, 7, seed=2) | {"index": torch.tensor([4, 5, -1])}]
    if task == "plain_text":
        batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    names = [site.name for site in find_sites(net) if site.layer and site.role != "q"]
    expected = mean_gradients(net, batches, kind, names, squares=True)
    blocks = BlockNet(net.config, LazyTensors(tmp_path / "net", "model"))
    parts = calibration_parts(KINDS[kind], batches, "true")
    sweeps = Sweeps(blocks, KINDS[kind], parts, tmp_path / "work", torch.float32)
    moments, found = BlockStatistics(sweeps, net, Gradients(sites=names, squares=True)), {}
    moments.collect(lambda number: False, lambda number, block, gradients: found.update(gradients))
    assert list(found) == names
    assert moments.bytes() == 8 * sum(net.get_submodule(name).weight.numel() for name in names)
    for name in names:
        for one, other in (
            (found[name].mean, expected[name].mean),
            (found[name].squares, expected[name].squares),
        ):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_disk(dtype, tmp_path):
    tensors = [torch.randn(2, *shape).to(dtype) for shape in ((3, 4, 5), (1, 2, 5))]
    with written(tmp_path / "states", dtype) as add:
        for tensor in tensors:
            add(tensor)
    read = list(stored(tmp_path / "states", dtype, [(3, 4, 5), (1, 2, 5)]))
    assert all(torch.equal(one, other) for one, other in zip(read, tensors, strict=True))
    with pytest.raises(RuntimeError), written(tmp_path / "other", dtype) as add:
        add(tensors[0])
        raise RuntimeError
    assert not (tmp_path / "other").exists()


def test_a_disk_that_is_too_small_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"--by_block: its files take 1000000\.0 GB, .* need less"):
        check_disk(tmp_path, 10**15)
