"""Layers of an export: the smallest of their outputs, in 16 bits as asked."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import as_deployed, gated, logits, narrow, net_of
from moments import decompose
from tiny import make_net

from lit_compress.data.datamodule import DataModule
from lit_compress.export.choices import Choices
from lit_compress.export.folder import Export, write_export
from lit_compress.export.fuse import cast, fuse
from lit_compress.export.program import Program
from lit_compress.export.report import Measured
from lit_compress.export.vocabulary import shrink_table
from lit_compress.layers import LowRankRowsLinear, LowRankSparseLinear
from lit_compress.models.accounting import density, stored_density
from lit_compress.models.backbones import load_net as load_backbone
from lit_compress.models.files import net_bytes
from lit_compress.models.sites import find_sites, stacks
from lit_compress.models.storage import load_net, save_net
from lit_compress.models.surgery import describe, factorize
from lit_compress.tasks import task_type
from lit_compress.tasks.records import get_task


def sparse_net(rank: int, kept: dict[str, int]):
    """A tiny net (32 wide, 64 neurons) whose matrices of a role keep their first rows beside factors of a rank."""
    return pruned(make_net().eval(), rank, kept)


def pruned(net, rank, kept):
    factors = (lambda _, weight, rank: decompose(weight, rank)) if rank else None
    factorize(net, {s.name: rank for s in find_sites(net)}, factors, LowRankSparseLinear)
    with torch.no_grad():
        for site in find_sites(net):
            net.get_submodule(site.name).sparse[kept.get(site.role, 4) :] = 0
    return net


def test_the_copy_shares_what_it_does_not_replace():
    """Also a net whose heads have all gone, of which one stays, with zeros, and one that is stored in 16 bits."""
    net = sparse_net(0, {"v": 0})
    before = {name: value.clone() for name, value in net.named_parameters()}
    fused = fuse(net)
    own = dict(net.named_parameters())
    shared = [name for name, value in fused.named_parameters() if value is own.get(name)]
    assert {name for name in own if "embeddings" in name or "classifier" in name} <= set(shared)
    assert not any(value.any() for name, value in fused.named_parameters() if "query" in name and "bias" not in name)
    cast(fused, "bfloat16")
    assert {value.dtype for value in fused.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, before[name]) for name, value in net.named_parameters())


def test_a_tied_table_stays_tied_in_16_bits():
    net = make_net("llama", "plain_text", tie_word_embeddings=True)
    cast(net, "bfloat16")
    assert net.get_input_embeddings().weight is net.get_output_embeddings().weight


@pytest.mark.parametrize("rank", [2, 0])
def test_every_layer_is_the_smallest(rank, tmp_path):
    """Also if factors and rows have nearly as many parameters as the matrix: what is asked is what is stored."""
    net = sparse_net(rank, {"q": 26, "k": 17} | ({} if rank else {"v": 32}))
    with_rows = {"q", "k", "o", "down"} | ({"v", "up"} if rank else set())  # else neurons without a row are cut
    small = fuse(net)
    for site in find_sites(small):
        assert (type(small.get_submodule(site.name)) is LowRankRowsLinear) == (site.role in with_rows)
    assert torch.allclose(logits(small), logits(net), atol=1e-5) and describe(fuse(small)) == describe(small)
    save_net(small, tmp_path)
    assert torch.equal(logits(load_net(tmp_path)), logits(small))


@pytest.fixture
def export(tiny_backbone, tiny_data, tmp_path):
    """export(make=None, **options) -> fused net, report and card; ``make`` makes the net from the dense one."""
    task, out, place = get_task("sst2"), tmp_path / "out", tmp_path / "dense"
    dense = load_backbone(str(tiny_backbone), task)
    place.mkdir()
    save_net(dense, place)
    net = fuse(pruned(load_net(place), 1, {"q": 15, "up": 40}))
    data = DataModule("sst2", str(tiny_backbone), str(tiny_data), batch_size=8)
    data.prepare_data()
    config = {"model": {"init_args": {"backbone": "tiny"}}}

    def run(make=None, budget=None, **options):
        small = make(load_net(place)) if make else net
        measured = {"dense": Measured(dense, net_bytes(place), 0.5)}
        source = Export(small, measured, "ITP", data, config, budget=budget)
        write_export(out, source, Choices(**options))
        return small, json.loads((out / "report.json").read_text()), (out / "README.md").read_text()

    return run


def test_report_and_card_say_what_is_stored(export):
    net, report, card = export()
    found = report["compressed"]
    assert found["density"] == density(net) == found["stored"] == stored_density(as_deployed(net))
    assert found["params"]["sites"] == round(found["stored"] * report["dense"]["params"]["sites"])
    assert f"to {found['density']:.1%} of the weights in its blocks" in card and "| stored" not in card


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "make"),
    [
        ("bert", factors), ("bert", narrow), ("bert", gated), ("llama", narrow),
        ("opt", narrow), ("bart", narrow), ("t5", lambda net: net), ("modernbert", lambda net: net),
    ],
)  # fmt: skip
def test_every_layer(family, make, dtype, tmp_path):
    layers = {"num_hidden_layers": 4} if make is gated else {}
    net = as_deployed(make((net_of(family, torch.float32) if make is narrow else make_net(family, **layers)).eval()))
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
