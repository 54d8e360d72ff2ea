"""What the pictures of SP3 show is what stands in the net."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_projected import disturb, form_of, net_of, random_bases

from lit_compress.analysis.widths import component_figure, is_narrow, width_figure, width_table
from lit_compress.calibration import COMPONENTS
from lit_compress.export.fuse import fuse
from lit_compress.projected import insert_projections


@pytest.mark.parametrize("family", ["bert", "distilbert", "opt"])
def test_widths_are_those_of_the_gates(family):
    net = net_of(family)
    assert not is_narrow(net)
    insert_projections(net, random_bases(net))
    kept = disturb(net, kill=[("head", 0), ("mha", 0), ("ffn_layer", 1)])
    fused = fuse(net)
    assert is_narrow(fused)
    rows = width_table(fused)
    for i, row in enumerate(rows):
        alive = float(kept["mha"][i])
        for j, part in enumerate(("attention", "ffn"), 1):
            site = min(2 * i + j, len(kept["hidden"]) - 1)  # before the blocks, the last one writes to its own
            assert row[f"hidden_{part}"] == kept["hidden"][site].float().mean()
        assert row["heads"] == kept["head"][i].float().mean() * alive
        assert row["ffn"] == kept["ffn"][i].float().mean() * float(kept["ffn_layer"][i])
        assert row["qk"] == kept["qk"][i].float().mean() * alive and row["vo"] == kept["vo"][i].float().mean() * alive
    assert rows[0]["heads"] == 0 and rows[1]["ffn"] == 0
    first, second, third = width_figure({"prune": rows}).axes
    assert [p.get_height() for p in third.patches] == [row["heads"] for row in rows]
    assert len(first.patches) == 4 and len(second.patches) == 6


def test_widths_of_a_decoder():
    """BART's attentions over the encoder's states have columns of their own; Llama has no heads to leave out."""
    net = net_of("bart")
    insert_projections(net, random_bases(net))
    kept = disturb(net)
    rows = width_table(fuse(net))
    assert [row["layer"] for row in rows] == [0, 1, 2, 3] and "qk_cross" not in rows[0]
    for row, cross in ((rows[2], 3), (rows[3], 5)):  # attentions: two of the encoder, then two in every block
        alive = float(kept["mha"][cross])
        assert row["qk_cross"] == kept["qk"][cross].float().mean() * alive
        assert row["heads_cross"] == kept["head"][cross].float().mean() * alive
    assert rows[2]["hidden_cross"] == kept["hidden"][7].float().mean()
    assert len(width_figure({"prune": rows}).axes[0].patches) == 4 + 2 + 4
    net, form = net_of("llama"), form_of("llama", 2)
    insert_projections(net, random_bases(net, 2), form)
    kept = disturb(net, form)
    for i, row in enumerate(width_table(fuse(net))):
        assert row["qk"] == row["vo"] == row["heads"] == 1 and row["ffn"] == kept["ffn"][i].float().mean()
        assert row["hidden_ffn"] == kept["hidden"][1].float().mean()


def test_a_dead_attention_can_be_logged(tmp_path):
    from lit_compress.analysis.pictures import log_structure
    from lit_compress.analysis.widths import log_widths
    from lit_compress.callbacks import RunLogger

    net = net_of("bert", torch.float32)
    insert_projections(net, random_bases(net))
    disturb(net, kill=[("mha", 0), ("ffn_layer", 1)])
    logger, fused = RunLogger(tmp_path, 0), fuse(net)
    save_file({"shares": torch.rand(5, 32)}, tmp_path / COMPONENTS)
    log_structure(logger, fused, "prune", 3)
    log_widths(logger, fused, tmp_path, "prune", 3)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"structure", "widths", "components"} == set(events.Tags()["images"])


def test_components():
    shares = torch.rand(5, 8).sort(descending=True).values
    axes = component_figure(shares, "x").axes[0]
    assert len(axes.lines) == 5 and axes.lines[1].get_ydata().tolist() == shares[1, :-1].tolist()
