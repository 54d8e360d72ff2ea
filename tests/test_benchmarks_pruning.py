"""Importance of neurons, patterns of zeros and allocation, against their definitions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_batch, make_net

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.analysis import pruning
from benchmarks.analysis.plots import FIGURES
from benchmarks.analysis.truncation import ranks
from lit_compress.models.sites import find_sites
from lit_compress.numerics.losses import task_loss
from lit_compress.utils.errors import UserError


def test_calibrated_sensitivity_is_the_mean_over_batches_of_row_means():
    net = make_net(dropout=0.0).eval()
    batches = [make_batch(seed=1), make_batch(seed=2)]
    found = pruning.calibrated_sensitivity(net, batches, "classification")
    expected = {name: torch.zeros(len(value)) for name, value in found.items()}
    for batch in batches:
        net.zero_grad()
        logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        task_loss(logits, batch["labels"], "classification").backward()
        for name in expected:
            weight = net.get_submodule(name).weight
            for i in range(len(weight)):
                expected[name][i] += float((weight[i] * weight.grad[i]).abs().mean()) / 2
    assert set(found) == {site.name for site in find_sites(net)}
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-4) and value.min() > 0


def test_stored_sensitivity_is_read_where_a_stage_left_it(tmp_path):
    assert pruning.stored_sensitivity(tmp_path) == {}
    save_file({"a.b/sensitivity": torch.ones(3), "a.b/scores": torch.zeros(3)}, tmp_path / "importance.safetensors")
    assert {k: v.tolist() for k, v in pruning.stored_sensitivity(tmp_path).items()} == {"a.b": [1.0, 1.0, 1.0]}


def test_rows_and_figure_of_neurons():
    net = make_net()
    sizes = {s.name: net.get_submodule(s.name).weight.shape[0] for s in find_sites(net)}
    scores = {label: {n: torch.rand(k) for n, k in sizes.items()} for label in ("one", "two")}
    scores["two"][find_sites(net)[0].name][:] = 0  # a matrix without importance is drawn, too
    rows = pruning.neurons(scores, net)
    assert len(rows) == 2 * sum(sizes.values())
    last = find_sites(net)[-1]
    assert rows[-1] | {"importance": 0} == {
        "model": "two", "site": last.name, "role": "down", "layer": 1, "row": 31, "importance": 0,
    }  # fmt: skip
    assert rows[-1]["importance"] == float(scores["two"][last.name][31])
    figure = FIGURES["neurons"](rows)
    assert len(figure.axes) == 12
    for axes, role in zip(figure.axes, ["q", "k", "v", "o", "up", "down"] * 2, strict=True):
        counts = [sum(bar.get_height() for bar in container) for container in axes.containers]
        assert counts == [64, 64] if role == "up" else [32, 32]


def test_pattern_by_hand():
    """5 x 32 of 32 weights: the first row of cells is full, of the second a quarter."""
    nets = {"a": make_net(), "b": make_net()}
    name = next(s.name for s in find_sites(nets["a"]) if s.role == "o")
    with torch.no_grad():
        nets["b"].get_submodule(name).weight[5:] = 0
    rows = pruning.pattern(nets)
    assert len(rows) == 2 * 8 * 8 and {r["site"] for r in rows} == {name}
    for row in rows:
        share = 1.0 if row["model"] == "a" or row["row"] == 0 else 0.25 if row["row"] == 1 else 0.0
        assert row["kept"] == share and row["rows_alive"] == (32 if row["model"] == "a" else 5) and row["out"] == 32
    figure = FIGURES["pattern"](rows)
    assert [axes.get_title().split("\n")[1] for axes in figure.axes] == [
        "100.0% kept, 32 of 32 rows", "15.6% kept, 5 of 32 rows",
    ]  # fmt: skip
    assert (figure.axes[1].images[0].get_array()[1] == 0.25).all()
    other = find_sites(nets["a"])[4].name
    assert {r["site"] for r in pruning.pattern(nets, other)} == {other}
    with pytest.raises(UserError, match=r"site: no 'bert.*dens' in a; did you mean"):
        pruning.pattern(nets, "bert.encoder.layer.0.output.dens")


def report(method, density, metric, task="sst2", **prune):
    init = {"density": density, "prune": prune}
    return {"task": task, "method": method, "config": {"model": {"init_args": init}}, "dense": {"metric": 0.9},
            "compressed": {"metric": metric, "density": density - 0.001}}  # fmt: skip


def test_allocation_reads_the_share_of_every_method():
    reports = [
        report("LowRankII", 0.2, 0.5), report("LoSparse", 0.2, 0.8, low_rank=0.05), report("ITP", 0.2, 0.6),
        report("LoSparse", 0.1, 0.7, low_rank=0.3), report("LowRankI", 0.2, 0.4),
        report("LoSparse", 0.04, 0.3, low_rank=None),
    ]  # fmt: skip
    rows = pruning.allocation(reports)
    assert [(r["density"], r["low_rank"], r["metric"]) for r in rows] == [
        (0.04, 0.02, 0.3), (0.1, 0.1, 0.7), (0.2, 0.0, 0.6), (0.2, 0.05, 0.8), (0.2, 0.2, 0.5), (0.2, 0.2, 0.4),
    ]  # fmt: skip
    assert all(r["measured_density"] == r["density"] - 0.001 and r["dense_metric"] == 0.9 for r in rows)
    (axes,) = FIGURES["allocation"](rows).axes
    assert {line.get_label(): list(line.get_xdata()) for line in axes.lines} == {
        "sst2, density 0.04": [0.02], "sst2, density 0.1": [0.1], "sst2, density 0.2": [0.0, 0.05, 0.2, 0.2],
    }  # fmt: skip
    with pytest.raises(UserError, match="a run of LPAF has no share of factors"):
        pruning.allocation([report("LPAF", 0.2, 0.5)])


def test_ranks_of_several_nets_are_drawn_over_their_density():
    rows = []
    for label, method, kept in (("a", "Magnitude", 16), ("b", "Magnitude", 8), ("c", "FirstOrder", 4)):
        net = make_net()
        with torch.no_grad():
            for site in find_sites(net):
                net.get_submodule(site.name).weight[kept:] = 0
        rows += ranks(net, label, method)
    (axes,) = FIGURES["ranks"](rows).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    density = {k: (5 * k * 32 + k * 64) / (5 * 32 * 32 + 64 * 32 + 32 * 32) for k in (4, 8, 16)}
    assert lines == {
        "Magnitude": [(pytest.approx(density[8]), 8.0), (pytest.approx(density[16]), 16.0)],
        "FirstOrder": [(pytest.approx(density[4]), 4.0)],
    }
    (axes,) = FIGURES["ranks"](rows[:12]).axes
    assert axes.get_xlabel() == "layer"


def test_a_density_that_the_config_does_not_say():
    """It is that of the budget, or the usual one of the method."""
    usual, asked = report("ITP", 0.2, 0.5), report("LowRankI", 0.3, 0.5) | {"budget": {"density": 0.3}}
    for found in (usual, asked):
        found["config"]["model"]["init_args"]["density"] = None
    assert [row["density"] for row in pruning.allocation([usual, asked])] == [0.2, 0.3]
