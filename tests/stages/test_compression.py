"""One compression in several passes is that of one pass; an error of the first process ends all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from in_memory import collect_kronecker
from tiny import make_net

from lit_compress.calibration import statistics
from lit_compress.calibration.moments import Moments, parts_within
from lit_compress.data.datamodule import DataModule
from lit_compress.models.sites import find_sites, shared_inputs, sublayers
from lit_compress.stages.compression import Calibration, Compression, collected, compress
from lit_compress.stages.low_rank import Factors
from lit_compress.stages.rank_rule import RankRule
from lit_compress.stages.units import weighted
from lit_compress.stages.weighting import Weighted
from lit_compress.tasks.records import TASKS
from lit_compress.utils.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("removes", ["components", "structures"])
def test_several_passes_change_nothing(removes, tiny_data, tiny_backbone, monkeypatch, capsys):
    """Models whose sums are more than a pass may have: the same choice, and the same tensors."""
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data))
    data.setup("fit")
    net = make_net("bert", "sst2", dropout=0.0, initializer_range=0.2).eval()
    settings = Weighted(weighting="kfac", calibration_examples=30, removes=removes)
    rule = settings.rule(RankRule(0.4, allocation="global"))

    def made() -> dict[str, torch.Tensor]:
        return compress(net, weighted(settings, rule), data.record, data, CPU, keep=True).state_dict()

    whole, dense = made(), net.state_dict()
    monkeypatch.setattr("lit_compress.stages.compression.MOST_BYTES", 40_000)
    monkeypatch.setattr("lit_compress.utils.progress._noted", set())
    parts = made()
    assert " passes over the examples, the sums of all matrices are too large" in capsys.readouterr().err
    assert whole.keys() == parts.keys()
    assert any(name not in dense or dense[name].shape != value.shape for name, value in whole.items())
    for name, value in whole.items():
        assert value.shape == parts[name].shape and torch.allclose(value, parts[name], rtol=1e-3, atol=1e-4), name


class Broken(Compression):
    """Finds something that cannot be used, which only the process sees that looks for it."""

    def measure(self, net: Any, names: Any, statistics: Any) -> Iterator[Any]:
        yield (), {"x": torch.zeros(1)}
        raise UserError("broken: a weight is not finite")


def _compress(rank: int, folder: str) -> None:
    said = "nothing"
    try:
        compress(make_net("bert"), Broken(), None, None, CPU, shared=True)  # type: ignore[arg-type]
    except UserError as error:
        said = str(error)
    Path(f"{folder}/{rank}.txt").write_text(said)


@pytest.mark.slow
def test_no_process_waits_for_one_that_has_stopped(tmp_path):
    processes.on_ranks(_compress, tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["broken: a weight is not finite"] * 2


def batch(size=6, length=9):
    ids = torch.randint(5, 100, (size, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "index": torch.arange(size)}


def test_several_passes_equal_one():
    net, cpu = make_net("bert").eval(), torch.device("cpu")
    names = [site.name for site in find_sites(net)]
    asked = Calibration(Moments("drawn"), [batch()])
    ((every, whole),) = collected(net, asked, TASKS["sst2"], cpu, most=inf)
    passes = list(collected(net, asked, TASKS["sst2"], cpu, most=40_000))
    assert every == names == [name for part, _ in passes for name in part] and 1 < len(passes) < 8
    for part, found in passes:
        assert list(found) and set(found) == set(part)
        for name in part:
            assert torch.allclose(found[name].inputs(), whole[name].inputs(), rtol=1e-4, atol=1e-6)
            assert torch.allclose(found[name].gradients(), whole[name].gradients(), rtol=1e-4, atol=1e-9)
    last = Moments("drawn", sites=[part.last for part in sublayers(net, removable=False)])
    whole = sum(last.bytes(net, [site]) for site in last.sites)
    assert len(parts_within(net, last, whole)) == 1 < len(parts_within(net, last, 40_000))
    inputs = Moments(None)  # sums of gradients are not counted
    whole = sum(inputs.bytes(net, group) for group in shared_inputs(net))
    assert len(parts_within(net, inputs, whole)) == 1
    some = replace(asked, statistic=Moments(None, sites=names[2:4]))
    ((part, found),) = collected(net, some, TASKS["sst2"], cpu)
    assert part == names[2:4] == list(found)


def test_a_decomposition_gives_its_moments_up():
    net = make_net("bert").eval()
    found = collect_kronecker(net, [batch()], "classification")
    names = [site.name for site in find_sites(net)]
    weights = {name: net.get_submodule(name).weight for name in names}
    svd = Factors(RankRule(), Weighted(weighting="kfac")).svd
    alone = {name: svd(net, [name], weights[name], dict(found), 1).sigma for name in names}
    for name in names:  # those after the first have the same inputs, whose sums stay
        assert torch.equal(svd(net, [name], weights[name], found, 1).sigma, alone[name])
        assert name not in found
    assert not found


def test_the_parts_of_a_batch_sum_to_it(monkeypatch):
    net = make_net("bert").double().eval()
    whole = collect_kronecker(net, [batch()], "classification")
    monkeypatch.setattr(statistics, "TOKENS", 20)
    parts = collect_kronecker(net, [batch()], "classification")
    for name, factors in whole.items():
        assert torch.allclose(parts[name].inputs(), factors.inputs()) and parts[name].tokens == factors.tokens
        assert torch.allclose(parts[name].gradients(), factors.gradients())
