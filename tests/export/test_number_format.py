"""Nets in 16 bits: every deployed layer computes in them, and files keep them."""

from __future__ import annotations

import pytest
import torch
from helpers import as_deployed, disturb, form_of, logits, net_of, random_bases, random_z
from tiny import make_net

from lit_compress.export.fuse import cast
from lit_compress.export.program import Program
from lit_compress.layers import LowRankSparseLinear
from lit_compress.methods.cofi.gates import possible_gates
from lit_compress.models.cut import cut_closed
from lit_compress.models.projected.insert import insert_projections
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import factorize
from lit_compress.models.vocabulary import shrink_table
from lit_compress.numerics.decompose import decompose
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task


def factors(net):
    """Factors, factors and rows, shared factors, a table of integers."""
    shared = dict(list(stacks(net).items())[-1:])
    sites = [s.name for s in find_sites(net)][:4]
    factorize(net, dict.fromkeys(sites[:2], 5), lambda _, w, r: decompose(w, r))
    factorize(net, dict.fromkeys(sites[2:], 2), lambda _, w, r: decompose(w, r), LowRankSparseLinear)
    with torch.no_grad():
        for name in sites[2:]:
            net.get_submodule(name).sparse[::2] = 0
    factorize(net, dict.fromkeys(shared, 9), lambda _, w, r: decompose(w, r), stacks=shared)
    net = as_deployed(net)
    shrink_table(net)
    return net


def narrow(net):
    form = form_of(net.config.model_type)
    insert_projections(net, random_bases(net), form)
    disturb(net, form, kill=[("heads", 0), ("attention_layer", 1), ("ffn_layer", 1)])
    return as_deployed(net)


def gated(net):
    cut_closed(net, random_z(net, possible_gates(net)))
    return as_deployed(net)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("bert", factors), ("bert", narrow), ("bert", gated), ("deberta-v2", narrow), ("llama", narrow),
        ("opt", narrow), ("bart", narrow), ("t5", lambda net: net), ("modernbert", lambda net: net),
    ],
)  # fmt: skip
def test_every_layer(family, make, dtype, tmp_path):
    layers = {"num_hidden_layers": 4} if make is gated else {}
    net = make((net_of(family, torch.float32) if make is narrow else make_net(family, **layers)).eval())
    expected = logits(net)
    cast(net, dtype)
    save_net(net, tmp_path)
    again = load_net(tmp_path, as_stored=True)
    assert again.dtype == net.dtype == getattr(torch, dtype)
    assert torch.equal(logits(again), logits(net)) and logits(net).dtype == net.dtype
    off = (logits(net).float() - expected).abs().max() / expected.abs().max()
    assert 0 < off < (0.1 if dtype == "bfloat16" else 0.02)
    assert (logits(load_net(tmp_path)) - expected).abs().max() / expected.abs().max() < 0.1


@pytest.mark.parametrize(("task", "family"), [("wiki_qa", "bert"), ("wikitext2", "llama")])
def test_a_program_is_evaluated_like_its_net(task, family):
    """Also one whose padding its configuration names, and one with an output layer over a vocabulary."""
    net = make_net(family, task, dropout=0.0).eval()
    ids = torch.randint(5, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "index": torch.arange(3), "labels": ids}
    batch["attention_mask"][0, 5:] = 0

    def run(given):
        with torch.no_grad():
            return {"logits": net(**{name: given[name] for name in ("input_ids", "attention_mask")}).logits}

    kind, program = task_type(get_task(task)), Program(run, net.config)
    with torch.no_grad():
        found, expected = (kind.outputs(each, batch, None) for each in (program, net))
    assert torch.allclose(found, expected, atol=1e-5)
