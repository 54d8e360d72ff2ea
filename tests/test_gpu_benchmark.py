"""The script that measures a GPU, on the second device: its whole path, and what it says of what fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from tiny import make_net

from benchmarks import timing
from benchmarks.device import gpu, gpu_forms, gpu_tables, mixed, step_times
from benchmarks.speed import one_shot

TINY = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip


def measure(results: Path, *words: str) -> None:
    """Run the script on tiny models; the second device computes nothing in bfloat16 quickly, and compiles nothing."""
    timing.SHAPES = timing.SHAPES | {timing.BERT_BASE: TINY}
    gpu_forms.STEP = 8
    gpu.BATCHES, gpu.LENGTHS, gpu.ROUNDS, gpu.MEMORY_SHAPE = (1,), (4, 8), 2, (1, 4)
    gpu.MIXED_TEXTS, mixed.BATCH, mixed.PACKED, gpu.SHAPES = 4, 2, 4, (timing.BERT_BASE,)
    gpu.TRAINED, gpu.WORDS, gpu.TEXTS, step_times.SKIPPED = (16, 2), 6, 64, 0
    one_shot.VOCABULARY, one_shot.TESTED = 500, 32
    gpu.FIRST = ("dense", gpu.LABELS, "Theseus")
    gpu.METHODS = {name: gpu.METHODS[name] for name in ("LPAF", "Theseus", "SVD")}
    gpu.COMPILED_AT, torch.compile = gpu.COMPILED_AT[:1], lambda net, **_: net  # type: ignore[assignment]
    gpu.apart = lambda function, *args, seconds: function(*args)
    sys.argv = ["gpu", "--results", str(results), "--device", "second", *words]
    gpu.main()


def test_the_whole_path_on_the_second_device(tmp_path):
    processes.on_second_device(measure, tmp_path, "--only", *gpu.PARTS)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert [(row["batch"], row["length"]) for row in found["answers"] if "times" in row] == [(1, 4), (1, 8)]
    sizes = {row["form"]: row for row in found["answers"] if "form" in row}
    densities = [sizes[form]["density"] for form in ("dense", "blocks, 1/4")]
    assert densities == [1, 0.25] and 0.07 < sizes["even, odd, 0.10"]["density"] <= 0.1
    stages = [(row["method"], row.get("stage")) for row in found["training"]]
    assert stages[:3] == [("dense", "dense"), (gpu.LABELS, "prune"), (gpu.LABELS, "retrain")]
    assert "failed" in found["training"][3], "0.25 of two blocks is none: the others are measured all the same"
    assert ("LPAF", "retrain") in stages and all(row["ms"] > 0 < row["peak_mb"] for row in found["training"][:3])
    said = "\n".join(gpu_tables.tables(found))
    assert "| even, multiples of 8, 0.10 | " in said and "| LPAF, labels alone | retrain |" in said
    assert found["factorize"][0]["density"] <= 0.16 and "`factorize` of BERT-base's shape, " in said
    assert "Not measured: training Theseus: SystemExit" in said
    processes.on_second_device(measure, tmp_path, "--only", "answers", "training")
    assert [time["way"] for time in found["compiled"][0]["times"]] == ["compiled"] * 2, "it has no graphs"
    again = json.loads(file.read_text())
    assert [row["way"] for row in found["mixed"][0]["mixed"]].count("packed, eager") == 2
    assert again["answers"] == found["answers"] and again["training"][:3] == found["training"][:3]
    assert {row["method"] for row in again["training"]} == {row["method"] for row in found["training"]}
    assert len(again["training"]) == len(found["training"]), "only what failed is tried again"


@processes.with_second_device
def test_the_peak_is_what_a_call_adds():
    kept = torch.zeros(10_000, device="second")
    assert 8000 <= gpu.peak_of(lambda: kept[:2000] + 1, torch.device("second", 0)) < 10_000


def test_what_fails_or_takes_too_long_costs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_answers_of", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    gpu.answers("cuda", 0.0, (rows := []).append)
    step = {"method": "SVD", "stage": "retrain", "ms": 2.0, "dense_ms": None, "peak_mb": 1.0}
    said = "".join(gpu_tables.tables({"answers": rows, "training": [step]}))
    assert "answers minilm-l6-h384: OutOfMemoryError: full" in said and "| SVD | retrain | 2.0 | - |" in said
    with pytest.raises(TimeoutError):
        gpu.apart(subprocess.run, ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60"], seconds=10)
    left = Path("/proc", (tmp_path / "pid").read_text().strip())
    assert any(time.sleep(0.1) or not left.exists() for _ in range(100))


def test_a_speed_up_that_the_spread_does_not_carry_is_no_number():
    assert gpu_tables.shown({"median": 2.04, "low": 1.98, "high": 2.1}) == "2.04x"
    assert gpu_tables.shown({"median": 1.04, "low": 0.9, "high": 1.3}) == "≈1x"
    assert gpu_tables.shown({"median": 2.04, "low": 1.2, "high": 3.0}) == "≈2.0x"


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_packed_texts_have_the_states_of_single_ones(family):
    net, lengths = make_net(family, initializer_range=0.2).eval(), np.array([3, 8, 5])
    row = {name: torch.as_tensor(value) for name, value in mixed.packed(lengths, 12, net.config.vocab_size).items()}
    assert row["input_ids"].shape == (1, 24) and row["starts"].tolist() == [0, 3, 11, 16, 24]
    with torch.inference_mode():
        texts = row["input_ids"].split(row["starts"].diff().tolist(), 1)
        alone = [net.base_model(input_ids=text).last_hidden_state[0] for text in texts]
        found = mixed.Packed(net, 12)(**row)[mixed.RESULT]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2", "llama", "modernbert"])
def test_a_model_of_another_attention_is_not_packed(family):
    """Relative positions, causal attention, and windows, which only a long text shows."""
    with pytest.raises(LookupError, match="it reads no packed texts: "):
        mixed.Packed(make_net(family, initializer_range=0.2).eval(), 64)
