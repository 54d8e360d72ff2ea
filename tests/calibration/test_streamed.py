"""Kronecker factors in several passes are those of one pass."""

from __future__ import annotations

import pytest
import torch
from tiny import make_net

from lit_compress.calibration import kronecker
from lit_compress.calibration.kronecker import collect_kronecker
from lit_compress.calibration.streamed import StreamedFactors, parts_within
from lit_compress.models.sites import find_sites, token_table
from lit_compress.stages.kronecker import KroneckerDecomposer


def batch(size=6, length=9):
    ids = torch.randint(5, 100, (size, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "index": torch.arange(size)}


def test_several_passes_equal_one():
    net = make_net("bert").eval()
    table, names = token_table(net), [site.name for site in find_sites(net)]
    whole, passes = collect_kronecker(net, [batch()], "classification", table=table), []

    def collect(part):
        passes.append(part)
        own = [name for name in part if name != table]
        return collect_kronecker(net, [batch()], "classification", own, table=table if table in part else None)

    parts = parts_within(net, 40_000, table)
    assert [name for part in parts for name in part] == [table, *names] and 1 < len(parts) < 8
    found = StreamedFactors(collect, parts)
    decomposer = KroneckerDecomposer(found, release=True)
    for name in names:
        expected = KroneckerDecomposer(whole).sigma(name, net.get_submodule(name).weight)
        assert torch.allclose(decomposer.sigma(name, net.get_submodule(name).weight), expected, rtol=1e-4)
    assert torch.allclose(found[names[0]].mean, whole[names[0]].mean) and passes == parts
    assert list(found) == [table, *names] and len(found) == len(names) + 1
    with pytest.raises(AssertionError, match="released"):
        found[names[0]].inputs()
    with pytest.raises(KeyError):
        found["other"]


def test_the_parts_of_a_batch_sum_to_it(monkeypatch):
    net = make_net("bert").double().eval()
    whole = collect_kronecker(net, [batch()], "classification")
    monkeypatch.setattr(kronecker, "TOKENS", 20)
    parts = collect_kronecker(net, [batch()], "classification")
    for name, factors in whole.items():
        assert torch.allclose(parts[name].inputs(), factors.inputs()) and parts[name].tokens == factors.tokens
        assert torch.allclose(parts[name].gradients(), factors.gradients())
