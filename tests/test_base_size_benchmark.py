"""The benchmark of base-size encoders, its whole way on tiny ones, and the code in which models travel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_batch, make_net, write_sentences

from benchmarks.base_size import coding, run
from lit_compress.models.storage import load_net, save_net
from lit_compress.run import workers


def write(net: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir()
    save_net(net, folder)  # type: ignore[arg-type]
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


def test_models_come_back(tmp_path: Path) -> None:
    """A model is read back as itself, up to its steps; one near a base takes less, and no rows that are the base's."""
    net = make_net("mpnet", initializer_range=0.2).eval()
    base = write(net, tmp_path / "base")
    with torch.no_grad():
        expected = net(**make_batch()).logits
        for value in net.parameters():
            value += 0.01 * torch.randn_like(value)
        tuned = net(**make_batch()).logits
    near = write(net, tmp_path / "near")
    parts = coding.pack(tmp_path / "parts", {"base": base}, None, limit=0.02, most=9)
    assert len(parts) > 1 and all(part.stat().st_size < 0.02 * coding.MIB for part in parts)
    (whole,) = coding.unpack(tmp_path / "parts", tmp_path / "out")
    assert (whole / "vocab.txt").read_text() == "a\nb\n"
    given, back = (load_file(folder / coding.FILE) for folder in (base, whole))
    assert all((given[key] - back[key]).abs().max() <= given[key].std() / 2 for key in given)
    torch.testing.assert_close(load_net(whole)(**make_batch()).logits, expected, rtol=0, atol=0.1)

    (part,) = coding.pack(tmp_path / "more", {"near": near}, base, limit=1, most=9)
    assert part.stat().st_size < sum(part.stat().st_size for part in parts)
    (again,) = coding.unpack(tmp_path / "more", tmp_path / "out", base)
    torch.testing.assert_close(load_net(again)(**make_batch()).logits, tuned, rtol=0, atol=0.05)
    assert coding.pack(tmp_path / "none", {"near": near}, base, limit=1, most=0.001) == []


def test_the_whole_way(tmp_path: Path, tiny_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time nothing is made; the same command continues, a failure stops no other run, and nothing is timed."""
    monkeypatch.setattr(workers, "start_process", workers.start_process)
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    write_sentences(tmp_path / "data" / "sst2")
    folders = {"backbone": tiny_backbone, **{name: tmp_path / name for name in ("data", "work", "results", "exports")}}
    words = ["--tasks", "sst2", "--device", "cpu", "--workers", "2", "--updates", "2", "--hold_out", "20", "--only",
             "SecondOrder", "Layers", "--commit", "abc",
             *(word for name, folder in folders.items() for word in (f"--{name}", str(folder)))]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["run", *words, "--minutes", "0"])
    run.main()
    (file,) = (tmp_path / "results").glob("*.json")
    assert json.loads(file.read_text())["rows"] == [] and not list((tmp_path / "exports").glob("*"))
    monkeypatch.setattr(sys, "argv", ["run", *words])
    run.main()
    made = json.loads(file.read_text())
    assert {(row["label"], row["asked"]) for row in made["rows"]} == {
        ("SecondOrder", "density=0.25"), ("SecondOrder", "density=0.1"), ("SecondOrder", "density=0.05"),
    }  # fmt: skip
    assert list(made["failed"]) == ["layers-density=0.084-seed=1"] and made["commit"] == "abc"
    assert all(0 < row["held_out"] <= 1 and row["interval"] for row in made["rows"] if row["steps"])
    assert "| 0.1 | SecondOrder | 0.1" in run.summary([made])
    models = coding.unpack(tmp_path / "exports", tmp_path / "out", tiny_backbone)
    assert [model.name for model in models] == ["teacher", *run.EXPORTED]
    begun = (tmp_path / "work/sst2/state/seed=1.json").read_text()
    run.main()
    assert (tmp_path / "work/sst2/state/seed=1.json").read_text() == begun  # all is there
