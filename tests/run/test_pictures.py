"""The pictures say what the net is, and show every method; the same numbers are the same picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import make_net

from lit_compress.models.accounting import density
from lit_compress.models.sites import find_sites
from lit_compress.models.surgery import factorize
from lit_compress.run.folder import Run
from lit_compress.run.loggers import Curves, log_stage
from lit_compress.run.pictures import as_svg, looks, pareto_figure, site_table, structure_figure
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


def test_structure_figure_shows_every_site(sparse):
    texts = [text.get_text() for text in structure_figure(site_table(sparse), "prune").axes[0].texts]
    assert len(texts) == len(find_sites(sparse)) and texts[1] == "3%"
    factorize(sparse, RankRule(0.5).allocate(sparse), None)
    assert {text.get_text() for text in structure_figure(site_table(sparse)).axes[0].texts} == {"r 8", "r 10"}


def test_tensorboard_gets_the_picture_of_the_run(sparse, tmp_path):
    logger = Curves(Run(tmp_path), "prune")
    logger.log_metrics({"train/loss": 1.0, "epoch": 0.0}, 105)
    logger.finalize("success")  # as Lightning does before the pictures are made
    log_stage([logger], sparse, "prune", 107, {}, 107)
    assert len(list((tmp_path / "tensorboard" / "prune").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard" / "prune"))
    events.Reload()
    tags = events.Tags()
    assert tags["scalars"] == ["train/loss", "epoch"] and events.Scalars("train/loss")[0].step == 105
    assert set(tags["images"]) == {"structure"} and events.Images("structure")[0].step == 107


def test_a_removed_sublayer_has_no_density():
    from lit_compress.models.cut import cut_closed

    net = make_net("bert")
    z = {"attention_layer": torch.tensor([[0.0], [1.0]]), "heads": torch.tensor([[1.0] * 4, [1.0, 0.0, 0.0, 1.0]]),
         "neurons": torch.ones(2, 64) * (torch.arange(64) < 20)}  # fmt: skip
    cut_closed(net, z)
    table = {row["name"].split("encoder.layer.")[1]: row["density"] for row in site_table(net)}
    assert len(table) == 12 and table["0.attention.self.query"] == 0 and table["1.attention.self.query"] == 0.5
    assert "gone" in [text.get_text() for text in structure_figure(site_table(net)).axes[0].texts]


def test_layers_of_an_encoder_and_a_decoder_are_not_on_top_of_each_other():
    axes = structure_figure(site_table(net := make_net("bart", "xsum"))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][::2] == ["encoder 0", "decoder 0"]
    assert {"q", "q cross"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert len({text.get_position() for text in axes.texts}) == len(find_sites(net))


def group(label: str, mean: float, **costs: float) -> dict:
    return {"label": label, "mean": mean, "bar": None, "costs": dict.fromkeys(("bytes", "latency")) | costs}


def marks(figure) -> dict:
    """Return (x, y) and the colour inside of the mark of every label."""
    lines = [box.lines[0] for box in figure.axes[0].containers]
    names = [box.get_label() for box in figure.axes[0].containers]
    return {name: (*line.get_xydata()[0], line.get_markerfacecolor()) for name, line in zip(names, lines, strict=True)}


def test_a_model_at_chance_is_hollow_and_one_far_behind_is_named():
    groups = [group("good, 2$", 0.88, bytes=2e6), group("bad", 0.135, bytes=1e6), group("luck", 0.7, bytes=1e6)]
    groups[2]["chance"] = True
    dense = group("", 0.9, bytes=1e7)
    figure = pareto_figure(groups, dense, "accuracy", "max")
    assert figure.get_suptitle() == "not drawn, far behind: bad 0.135" and "bad" not in marks(figure)
    assert marks(figure)["luck"][2] == "white" != marks(figure)[r"good, 2\$"][2]
    text = as_svg(figure)
    assert text == as_svg(pareto_figure(groups, dense, "accuracy", "max"))
    assert ElementTree.fromstring(text).tag.endswith("svg") and "good, 2$" in text and "MB on disk" in text
    perplexity = [group("a", 20.0, bytes=1e6), group("b", 900.0, bytes=1e6)]
    assert "b 900" in pareto_figure(perplexity, group("", 18.0), "perplexity", "min").get_suptitle()
    assert pareto_figure([], group("", 0.9), "accuracy", "max").get_suptitle() == ""
    assert len(marks(pareto_figure([group("all", 0.1, bytes=1e6)], dense, "accuracy", "max"))) == 1
    assert len({tuple(look.values()) for look in looks(map(str, range(60))).values()}) == 50
