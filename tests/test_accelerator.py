"""Training in bf16-mixed on the second device, through the script that measures machines with an accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import processes
import pytest

from benchmarks import common
from benchmarks.device import accelerator, tables
from benchmarks.device.accelerator import SIZES, Size, contract
from benchmarks.scaling.run import write_inputs

RATES = ["--model.dense.learning_rate", "3e-3", "--model.retrain.learning_rate", "1e-3"]
PRUNE = ["--model.prune.learning_rate", "1e-3"]
CASES = {  # the dense stage, masks and low rank; factors that several matrices share
    "LPAF": [*RATES, *PRUNE],
    "SecondOrder": RATES,
}


SMALL = Size(32, 2, (4, 9), 32, 8)  # processors without bfloat16 compute it slowly


def stay_in_this_process() -> None:
    """Let fits run here, where the device is; their exports are loaded in this process only."""
    from lit_compress.export import folder

    accelerator.apart = lambda function, *args: function(*args)
    folder.check_export = lambda *_: 0.0


@pytest.mark.parametrize("method", CASES)
@processes.with_second_device
def test_16_bits_equal_those_of_the_cpu(method: str, tmp_path: Path) -> None:
    """Products of Linears are in bfloat16; CPU and device round in other places, as their lists of autocast differ."""
    import second_device

    stay_in_this_process()
    with second_device.without_float64():
        write_inputs(tmp_path, SMALL.width, SMALL.layers, SMALL.words, SMALL.rows, dropout=0.0)
        rows = contract(method, "second", SMALL, tmp_path, *CASES[method])["rows"]
    for row in rows:
        assert row["products"]["bfloat16"] > 100 and row["products"].get("float32", 0) == 0
        assert row["device"] <= max(2 * row["rounding"], 0.02 * row["largest"])  # five roundings to bfloat16
        assert row["rounding"] > 0


def script(results: Path) -> None:
    """Run the script on small nets and one method of each part."""
    stay_in_this_process()
    accelerator.SIZES = dict.fromkeys(SIZES, Size(16, 2, (4, 9), 16, 8))
    accelerator.PARTS = {part: (measure, methods[:1]) for part, (measure, methods) in accelerator.PARTS.items()}
    sys.argv = ["accelerator", "--results", str(results)]
    accelerator.main()


def test_the_script_measures_what_the_page_shows(tmp_path, monkeypatch):
    processes.on_second_device(script, tmp_path)
    found = {result["part"]: result for result in common.load(tmp_path)}
    assert {name: result["device"] for name, result in found.items()} == {"contract": "second", "steps": "second"}
    stages = found["steps"]["rows"]
    assert [(row["name"], row["steps"]) for row in stages] == [("dense", 4), ("prune", 4), ("retrain", 4)]
    assert all(row["gpu_peak_mib"] > 0 < row["seconds"] and row["products"]["bfloat16"] > 0 for row in stages)
    monkeypatch.setattr(tables, "load", lambda script: common.load(tmp_path))
    equal, times = tables.accelerator()[1:3]
    assert [line.split(" | ")[:2] for line in equal.splitlines()[2:]] == [["| SVD", "dense"], ["| SVD", "export"]]
    assert [line.split(" | ")[1] for line in times.splitlines()[2:]] == ["dense", "prune", "retrain"]


@pytest.mark.parametrize(
    ("words", "text"), [([], "finds no accelerator"), (["--device", "cuda"], "'cuda' is not on this machine")]
)
def test_without_an_accelerator_the_script_is_one_line(words, text, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["accelerator", "--results", str(tmp_path / "results"), *words])
    with pytest.raises(SystemExit) as stop:
        accelerator.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and text in error and error.count("\n") == 1
    assert not (tmp_path / "results").exists()
