"""LoSparse inside CoFi: rows compete only where gates are open, factors and rows together meet the density."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import logits
from tiny import make_net

from lit_compress.export.fuse import fuse
from lit_compress.methods import CoFiLoSparse
from lit_compress.methods.cofi.with_losparse import OpenRows, RowsInGates
from lit_compress.models import accounting as budget
from lit_compress.models.cut import cut_closed
from lit_compress.models.sites import find_sites
from lit_compress.utils.errors import UserError
from lit_compress.utils.sharding import own_rows


def rows_of(net, gates, density=0.2, arrived=True, **settings):
    """The rows' part of the stage on a net, at its last step, with random scores; closed rows score highest."""
    stage: Any = SimpleNamespace(open_units=lambda step: gates, arrived=lambda step: arrived, round_to=1)
    rows = OpenRows(RowsInGates(**settings), 0.5, density, stage)
    rows.begin(net, None, {})
    rows.attach(net)
    rows.set_total_steps(100)
    rows.refresh(100)
    generator = torch.Generator().manual_seed(0)
    for score, open_ in zip(rows.scores, rows.open, strict=True):
        score.copy_(torch.rand(len(score), generator=generator) + 9 * ~open_)
    return rows


GATES = {
    "attention_layer": torch.tensor([[True], [False], [True], [True]]),
    "heads": torch.tensor([[True, False, False, True], [False] * 4, [False, False, True, False], [True] * 4]),
    "ffn_layer": torch.tensor([[True], [True], [False], [False]]),
}


def net_of():
    return make_net("bert", num_hidden_layers=4).eval()


def test_open_rows_and_columns():
    rows = rows_of(net_of(), GATES)
    sites = {site.name.split("layer.")[1]: i for i, site in enumerate(find_sites(net_of()))}
    head = torch.arange(32) // 8
    q, o, up = (sites[f"0.{path}"] for path in ("attention.self.query", "attention.output.dense", "intermediate.dense"))
    assert torch.equal(rows.open[q], (head == 0) | (head == 3)) and rows.columns[q] == 32
    assert rows.open[o].all() and rows.columns[o] == 16 and rows.open[up].all()
    assert not any(rows.open[sites[f"1.{path}"]].any() for path in ("attention.self.value", "attention.output.dense"))
    assert not rows.open[sites["2.output.dense"]].any()


def test_open_rows_of_matrices_in_one():
    """ModernBERT: a head that is closed closes its rows in all three thirds of Wqkv."""
    net = make_net("modernbert", num_hidden_layers=4).eval()
    rows, names = rows_of(net, GATES), [site.name for site in find_sites(net)]
    kept = torch.tensor([True, False, False, True]).repeat_interleave(8).repeat(3)
    first, second = (names.index(f"model.layers.{i}.attn.Wqkv") for i in (0, 1))
    assert torch.equal(rows.open[first], kept) and not rows.open[second].any()
    assert rows.columns[names.index("model.layers.0.attn.Wo")] == 16


def test_closed_rows_do_not_compete():
    """The ranking trap: what gates have closed takes no share of the budget, nor does it shield the open ones."""
    net = net_of()
    rows = rows_of(net, GATES)
    rows.prune(100)
    for weight, score, open_ in zip(rows._weights, rows.scores, rows.open, strict=True):
        assert weight[~open_].ne(0).any(1).all()  # left alone
        kept = weight.ne(0).any(1) & open_
        if kept.any() and (open_ & ~kept).any():
            assert score[kept].min() >= score[open_ & ~kept].max()
    open_rows = sum(int(rows_.sum()) for rows_ in rows.open)
    kept_rows = sum(int((w.ne(0).any(1) & o).sum()) for w, o in zip(rows._weights, rows.open, strict=True))
    assert 0 < kept_rows < open_rows


@pytest.mark.parametrize("density", [0.08, 0.2, 0.3])
def test_factors_and_rows_meet_the_density(density):
    """Measured on what is stored after the cut; less than a row is missing."""
    net = net_of()
    rows = rows_of(net, GATES, density)
    rows.prune(100)
    z = {name: mask.float() for name, mask in GATES.items()}
    cut_closed(net, z)
    small = fuse(net)
    total = budget.dense_site_params(net_of())
    assert 0 <= round(density * total) - budget.count_params(small).sites <= 64
    assert torch.allclose(logits(small), logits(net), atol=1e-5)


def test_what_whole_matrices_save_goes_to_other_rows():
    """Up to the budget and never above it, where scores fill some matrices and leave others empty."""
    gates = {
        "attention_layer": torch.tensor([[True], [True]]),
        "heads": torch.tensor([[True, True, True, False], [True] * 4]),
        "ffn_layer": torch.tensor([[True], [False]]),
    }
    total, missing = budget.dense_site_params(make_net("bert")), []
    for density in (0.40, 0.43, 0.45, 0.46, 0.48, 0.5, 0.55, 0.57):
        rows = rows_of(make_net("bert").eval(), gates, density)
        for i, score in enumerate(rows.scores):
            score.add_(0.7 * i)
        rows.prune(100)
        stored = 0
        for weight, open_, columns, name in zip(rows._weights, rows.open, rows.columns, rows._sites, strict=True):
            kept, count = int((weight.ne(0).any(1) & open_).sum()), int(open_.sum())
            factors = rows.budget.ranks[name] * (count + columns) if count else 0
            stored += min(factors + kept * columns, count * columns)
        missing.append(round(density * total) - stored)
    assert min(missing) >= 0 and max(missing) <= 64


def test_before_the_gates_arrive_the_share_is_of_what_is_open():
    net = net_of()
    rows = rows_of(net, GATES, 0.01, arrived=False)
    rows.prune(100)
    alive = sum(int(open_.sum()) * columns for open_, columns in zip(rows.open, rows.columns.tolist(), strict=True))
    cut_closed(net, {name: mask.float() for name, mask in GATES.items()})
    assert budget.count_params(fuse(net)).sites == pytest.approx(0.5 * alive, rel=0.02)


def test_shards_know_their_rows():
    for ranks in (2, 3, 5):
        parts = [own_rows(torch.arange(32), (rank, ranks)) for rank in range(ranks)]
        assert [part.tolist() for part in parts] == [part.tolist() for part in torch.arange(32).chunk(ranks)]


def test_settings_are_checked():
    for wrong, word in (({"share": 1.5}, "share"), ({"low_rank": 0.6}, "low_rank"), ({"interval": 0}, "interval")):
        with pytest.raises(UserError, match=word):
            RowsInGates(**wrong)
    with pytest.raises(UserError, match=r"prune\.share.*0\.75"):
        CoFiLoSparse(density=0.5, prune=RowsInGates(share=0.4)).stages()
    assert CoFiLoSparse(density=1.0).stages()[2].density == 1.0
