"""K-prune and other estimates of benchmarks/second_order, on a tiny model; what is made is not made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import WORDS, write_model

from benchmarks import common
from benchmarks.second_order import estimates, untrained, untrained_tables


def write_teacher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a tiny teacher and its data; return the options of the scripts that read them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_model(folder / "teachers" / "sst2", "bert", "sst2")
    (folder / "data" / "sst2").mkdir(parents=True)
    for split, count in (("train", 60), ("validation", 20)):
        rows = {
            "sentence": [" ".join(WORDS[i % 7 : i % 7 + 9]) for i in range(count)],
            "label": [i % 2 for i in range(count)],
        }
        pq.write_table(pa.table(rows), folder / "data" / "sst2" / f"{split}.parquet")
    folders = [word for name in ("teachers", "data", "work", "results") for word in (f"--{name}", str(folder / name))]
    monkeypatch.setattr(untrained, "HELD_OUT", {"sst2": 20})
    return [*folders, "--tasks", "sst2"]


def test_kprune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = write_teacher(tmp_path, monkeypatch)
    monkeypatch.setattr(untrained, "STEPS", {"refined": 1, "distilled": 1, "longer": 2})
    monkeypatch.setattr(untrained, "JUDGES", 16)
    monkeypatch.setattr(sys, "argv", ["untrained", *words, "--densities", "0.5"])
    untrained.main()
    made = {result["name"]: result for result in common.load(tmp_path / "results")}
    after = {f"sst2-{cell}-0.5{end}" for cell in untrained.MADE for end in ("", *(f"-{a}" for a in untrained.STEPS))}
    assert set(made) == {"sst2-dense", "sst2-kprune-0.5"} | after
    assert all(r["dev"]["val/rows"] == r["held_out"]["val/rows"] == 20 and r["file_density"] <= 0.51
               for name, r in made.items() if name != "sst2-dense")  # fmt: skip
    monkeypatch.setattr(untrained.Untrained, "store", None)
    untrained.main()

    monkeypatch.setattr(
        untrained_tables, "load", lambda script: list(made.values()) if script.endswith("untrained") else []
    )
    _, shown, _ = untrained_tables.untrained()
    found = untrained_tables.UNTRAINED_NAMES["search"]
    assert [line.split(" | ")[1] for line in shown.splitlines()[2:]] == [
        *("K-FAC, heads and neurons", "K-prune", "K-FAC, components", found),
        *["K-FAC, heads and neurons", "K-FAC, components", found] * 3,
    ]  # fmt: skip


def test_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = write_teacher(tmp_path, monkeypatch)
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
