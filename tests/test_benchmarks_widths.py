"""What the pictures of SP3 show is what stands in the net."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import as_deployed, disturb, net_of, random_bases

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.analysis.widths import width_figure, width_table
from lit_compress.models.projected.insert import insert_projections


@pytest.mark.parametrize("family", ["bert", "distilbert", "opt"])
def test_widths_are_those_of_the_gates(family):
    net = net_of(family)
    insert_projections(net, random_bases(net))
    kept = disturb(net, kill=[("heads", 0), ("attention_layer", 0), ("ffn_layer", 1)])
    fused = as_deployed(net)
    rows = width_table(fused)
    for i, row in enumerate(rows):
        alive = float(kept["attention_layer"][i])
        for j, part in enumerate(("attention", "ffn"), 1):
            site = min(2 * i + j, len(kept["hidden"]) - 1)  # before the blocks, the last one writes to its own
            assert row[f"hidden_{part}"] == kept["hidden"][site].float().mean()
        assert row["heads"] == kept["heads"][i].float().mean() * alive
        assert row["ffn"] == kept["neurons"][i].float().mean() * float(kept["ffn_layer"][i])
        assert row["qk"] == kept["qk"][i].float().mean() * alive and row["vo"] == kept["vo"][i].float().mean() * alive
    assert rows[0]["heads"] == 0 and rows[1]["ffn"] == 0
    first, second, third = width_figure({"prune": rows}).axes
    assert [p.get_height() for p in third.patches] == [row["heads"] for row in rows]
    assert len(first.patches) == 4 and len(second.patches) == 6
