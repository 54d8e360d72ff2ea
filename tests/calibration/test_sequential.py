"""Sequential refit against least squares on the tokens themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from in_memory import collect_kronecker
from tiny import make_batch, make_net

from lit_compress.calibration.sequential import refit_net
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.stages.kronecker import KroneckerDecomposer, biased_sites


def nets(family="bert", names=None, rank=3):
    """A dense net and its factorized copy, what is centred, and batches with padding."""
    dense = make_net(family, dropout=0.0, initializer_range=0.3).eval().double()
    batch = make_batch(size=6)
    batch = batch | {"index": torch.arange(len(batch["input_ids"]))}
    centred = biased_sites(dense)
    moments = collect_kronecker(dense, [batch], "classification", labels=None)
    decomposer = KroneckerDecomposer(moments, False, centred, (1e-9, 1e-9))
    net = copy.deepcopy(dense)
    chosen = [s.name for s in find_sites(net)] if names is None else names(find_sites(net))
    factorize(net, dict.fromkeys(chosen, rank), decomposer.factors, mean=decomposer.mean)
    halves = [{k: v[i : i + 3] for k, v in batch.items()} for i in (0, 3)]
    return dense, net, centred, halves, batch


def inputs(net, batch, name):
    """The inputs of a site at real tokens."""
    seen = []
    handle = net.get_submodule(name).register_forward_hook(lambda _, args, out: seen.append(args[0]))
    with torch.no_grad():
        net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    handle.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])[batch["attention_mask"].bool().flatten()]


def test_a_factor_behind_compressed_blocks_is_least_squares():
    """Of the first block's q and v and the second block's first site: [R x', 1] -> W x + b by lstsq."""
    dense, net, centred, halves, batch = nets()
    second = next(s for s in find_sites(net) if s.layer == 1).name
    refit_net(dense, net, lambda: halves, "classification", centred=centred, damping=1e-12)
    old, new = dense.get_submodule(second), net.get_submodule(second)
    x, other = inputs(dense, batch, second), inputs(net, batch, second)
    design = torch.cat([other @ new.right.detach().T, torch.ones(len(other), 1).double()], 1)
    solution = torch.linalg.lstsq(design, x @ old.weight.detach().T + old.bias.detach()).solution
    assert torch.allclose(new.left, solution[:-1].T, atol=1e-5)
    assert torch.allclose(new.bias, solution[-1], atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_outputs_come_closer_to_the_dense_net(family):
    dense, net, centred, halves, batch = nets(family)
    last = next(s for s in find_sites(net) if s.layer == 1).name

    def error(some):
        layer, old = some.get_submodule(last), dense.get_submodule(last)
        with torch.no_grad():
            return float((layer(inputs(some, batch, last)) - old(inputs(dense, batch, last))).square().mean())

    before = error(net)
    refit_net(dense, net, lambda: halves, "classification", centred=centred)
    assert error(net) < 0.95 * before


def test_nothing_changes_behind_dense_blocks():
    """With x' = x the factors are best already, and right factors, other matrices and hooks are left alone."""
    dense, net, centred, halves, _ = nets(names=lambda sites: [s.name for s in sites if s.layer == 1][:3])
    before = copy.deepcopy(net.state_dict())
    refit_net(dense, net, lambda: halves, "classification", centred=centred, damping=1e-9)
    for name, value in net.state_dict().items():
        assert torch.allclose(value, before[name], atol=1e-5), name
        assert torch.equal(value, before[name]) or name.endswith((".left", ".bias"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*net.modules(), *dense.modules()))
    assert all(p.requires_grad for p in net.parameters())


def test_parts_on_two_ranks_are_one():
    """With ``reduce`` the sums of all ranks count: here twice those of one rank, which changes no mean."""
    dense, net, centred, halves, _ = nets()
    other = copy.deepcopy(net)
    refit_net(dense, net, lambda: halves, "classification", centred=centred)
    refit_net(dense, other, lambda: halves, "classification", centred=centred, reduce=lambda t: t.mul_(2))
    assert all(torch.allclose(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
