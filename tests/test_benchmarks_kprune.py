"""K-prune of benchmarks/second_order: its sums by loops, and all of it on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny import WORDS, write_model

from benchmarks import common
from benchmarks.second_order import untrained, untrained_tables


def write_teacher(folder: Path) -> list[str]:
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
    return [*folders, "--tasks", "sst2"]


def test_the_rows_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a tiny model; what is made is not made again."""
    words = write_teacher(tmp_path)
    monkeypatch.setattr(untrained, "HELD_OUT", {"sst2": 20})
    monkeypatch.setattr(untrained, "STEPS", {"refined": 1, "distilled": 1, "longer": 2})
    monkeypatch.setattr(sys, "argv", ["untrained", *words, "--densities", "0.5"])
    untrained.main()
    made = {result["name"]: result for result in common.load(tmp_path / "results")}
    after = {f"sst2-{cell}-0.5{end}" for cell in untrained.REMOVES for end in ("", *(f"-{a}" for a in untrained.STEPS))}
    assert set(made) == {"sst2-dense", "sst2-kprune-0.5"} | after
    assert all(r["dev"]["val/rows"] == r["held_out"]["val/rows"] == 20 and r["file_density"] <= 0.51
               for name, r in made.items() if name != "sst2-dense")  # fmt: skip
    monkeypatch.setattr(untrained.Untrained, "store", None)
    untrained.main()

    monkeypatch.setattr(
        untrained_tables, "load", lambda script: list(made.values()) if script.endswith("untrained") else []
    )
    _, shown, _ = untrained_tables.untrained()
    assert [line.split(" | ")[1] for line in shown.splitlines()[2:]] == [
        *("K-FAC, heads and neurons", "K-prune", "K-FAC, components"),
        *["K-FAC, heads and neurons", "K-FAC, components"] * 3,
    ]  # fmt: skip
