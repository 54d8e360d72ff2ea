"""Other estimates of benchmarks/second_order: their sums by loops, and all of it on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_benchmarks_kprune import write_teacher

from benchmarks import common
from benchmarks.second_order import estimates, untrained, untrained_tables


def test_the_rows_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a tiny model; what is made is not made again."""
    words = write_teacher(tmp_path)
    monkeypatch.setattr(untrained, "HELD_OUT", {"sst2": 20})
    ladders, once = [], estimates.rescaled

    def keep(costs: torch.Tensor, levels: list[tuple[int, float]]) -> torch.Tensor:
        ladders.append((len(costs), levels))
        return once(costs, levels)

    monkeypatch.setattr(estimates, "rescaled", keep)
    line = ["estimates", *words, "--densities", "0.5", "--texts", "20", "--ladder_texts", "8"]
    monkeypatch.setattr(sys, "argv", line)
    estimates.main()
    config = json.loads((tmp_path / "teachers" / "sst2" / "config.json").read_text())
    assert len(ladders) == 2 * config["num_hidden_layers"]
    for steps, levels in ladders:  # each sub-layer alone, until it has no units
        assert levels[-1][0] == steps and 0 < levels[0][1] < levels[-1][1]
    made = list(common.load(tmp_path / "results"))
    pairs = {(result["variant"], result["removes"]) for result in made}
    assert pairs == {(v, r) for v in estimates.VARIANTS for r in untrained.REMOVES} - {("ladder", "components")}
    for result in made:
        row = result["rows"]["0.5"]
        assert row["measured"] > 0 and row["estimated"] > 0 and 0 <= row["metric"] <= 1 and result["held_out"]
    monkeypatch.setattr(estimates.Estimates, "result", None)
    estimates.main()

    monkeypatch.setattr(untrained_tables, "load", lambda script: made if script.endswith("estimates") else [])
    _, shown, _ = untrained_tables.estimates()
    assert [len(line.split("|")) for line in shown.splitlines()] == [2 + 3 + len(estimates.VARIANTS)] * 4
