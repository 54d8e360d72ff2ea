"""The pictures say what the net is."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import make_net

from lit_compress.analysis.pictures import site_table, structure_figure
from lit_compress.models.accounting import density
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.run.folder import Run
from lit_compress.run.loggers import log_stage, stage_loggers
from lit_compress.stages.rank_rule import RankRule


@pytest.fixture
def sparse():
    net = make_net()
    for i, site in enumerate(find_sites(net)):
        weight = net.get_submodule(site.name).weight
        with torch.no_grad():
            weight[i:] = 0
    return net


def test_site_table_adds_up_to_the_density(sparse):
    table = site_table(sparse)
    sizes = [sparse.get_submodule(row["name"]).weight.numel() for row in table]
    total = sum(row["density"] * size for row, size in zip(table, sizes, strict=True)) / sum(sizes)
    assert total == pytest.approx(density(sparse))
    net = make_net()
    ranks = RankRule(0.5).allocate(net)
    factorize(net, ranks, None)
    assert {row["name"]: row["rank"] for row in site_table(net)} == ranks


def test_site_table_of_an_ordinary_net_compares_it_with_the_dense_one():
    dense, small = make_net("llama"), make_net("llama", intermediate_size=16)
    found = {row["role"]: row["density"] for row in site_table(small, dense)}
    assert found["up"] == found["down"] == 0.25 and found["q"] == 1


def test_structure_figure_shows_every_site(sparse):
    texts = [text.get_text() for text in structure_figure(sparse, "prune").axes[0].texts]
    assert len(texts) == len(find_sites(sparse)) and texts[1] == f"{1 / 32:.2f}"
    factorize(sparse, RankRule(0.5).allocate(sparse), None)
    assert {text.get_text() for text in structure_figure(sparse, "x").axes[0].texts} == {"8", "10"}


def test_tensorboard_gets_histograms_and_the_picture_of_the_run(sparse, tmp_path):
    (logger,) = stage_loggers(None, Run(tmp_path), "prune", 100, None)
    logger.log_metrics({"train/loss": 1.0, "epoch": 0.0, "val/score": float("-inf")}, 5)
    logger.finalize("success")  # as Lightning does before the pictures are made
    log_stage([logger], sparse, "prune", 7, {}, 7)
    assert len(list((tmp_path / "tensorboard" / "prune").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard" / "prune"))
    events.Reload()
    tags = events.Tags()
    assert tags["scalars"] == ["train/loss", "epoch"] and events.Scalars("train/loss")[0].step == 105
    assert set(tags["images"]) == {"structure"} and events.Images("structure")[0].step == 107
    assert set(tags["histograms"]) == {f"density/{role}" for role in ("q", "k", "v", "o", "up", "down")}


def test_a_removed_sublayer_has_no_density():
    from lit_compress.models.cut import cut_closed

    net = make_net("bert")
    z = {"attention_layer": torch.tensor([[0.0], [1.0]]), "heads": torch.tensor([[1.0] * 4, [1.0, 0.0, 0.0, 1.0]]),
         "neurons": torch.ones(2, 64) * (torch.arange(64) < 20)}  # fmt: skip
    cut_closed(net, z)
    table = {row["name"].split("encoder.layer.")[1]: row["density"] for row in site_table(net)}
    assert len(table) == 12 and table["0.attention.self.query"] == 0 and table["1.attention.self.query"] == 0.5
    assert "0.00" in [text.get_text() for text in structure_figure(net, "x").axes[0].texts]
