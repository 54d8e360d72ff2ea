"""Importance of neurons, patterns of zeros and allocation, against their definitions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import make_batch, make_net

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.analysis import pruning
from benchmarks.analysis.plots import FIGURES
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
