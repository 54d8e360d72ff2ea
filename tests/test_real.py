"""The main job on real weights and real data, cut short."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from lit_compress.__main__ import main


def part_of(folder, out):
    """Write the first rows of a task's real files to ``out``; return it."""
    out.mkdir()
    for split, rows in (("train", 64), ("validation", 64)):
        pq.write_table(pq.read_table(folder / f"{split}.parquet").slice(0, rows), out / f"{split}.parquet")
    return str(out)


@pytest.mark.slow
def test_lpaf_on_minilm_and_sst2(shared, tmp_path):
    folder = tmp_path / "run"
    main(
        [
            "fit", "--config", "lpaf_sst2.yaml", "--model.backbone", str(shared / "models" / "minilm-l6-h384"),
            "--data.path", part_of(shared / "data" / "glue" / "sst2", tmp_path / "data"),
            "--model.dense.epochs", "1", "--model.dense.learning_rate", "1e-4",
            "--model.prune.epochs", "1", "--model.retrain.epochs", "1", "--trainer.enable_progress_bar", "false",
            "--run_dir", str(folder),
        ]
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert report["dense"]["params"]["sites"] == 10_616_832 and report["dense"]["density"] == 1.0
    assert report["dense"]["bytes"] < 2.01 * report["dense"]["params"]["total"]  # float16, as the model was given
    assert report["stages"]["prune"]["density"] == 0.25
    assert 0.24 < report["compressed"]["density"] <= 0.25
    assert report["ratios"]["flops"] < 0.3 and report["ratios"]["speedup"] > 1.2
    assert report["export_difference"] <= 1e-5


@pytest.mark.slow
def test_fwsvd_on_minilm_and_mrpc(shared, tmp_path):
    """33 % of the ranks of real weights; a fine-tuned net is factorized at once to the same factors."""
    data = [
        "--data.task",
        "mrpc",
        "--data.path",
        part_of(shared / "data" / "glue" / "mrpc", tmp_path / "data"),
        "--data.train_examples",
        "64",
    ]
    backbone = ["--model.backbone", str(shared / "models" / "minilm-l6-h384")]
    epochs = ["--model.dense.epochs", "1", "--model.dense.learning_rate", "1e-4", "--model.retrain.epochs", "1"]
    run = ["--trainer.enable_progress_bar", "false", "--run_dir", str(tmp_path / "run")]
    main(["fit", "--config", "fwsvd_mrpc.yaml", *backbone, *data, *epochs, *run])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    sites = 6 * 126 * (4 * (384 + 384) + 2 * (384 + 1536))
    assert report["compressed"]["params"]["sites"] == sites and report["ratios"]["params"]["sites"] < 0.5
    main(["factorize", str(tmp_path / "run" / "dense" / "net"), str(tmp_path / "out"), *data, "--weighting", "fisher"])
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert again["compressed"]["params"] == report["compressed"]["params"]
    assert again["compressed"]["metric"] == pytest.approx(report["compressed"]["initial"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"])
def test_every_glue_task_runs_whole_on_its_real_files(task, shared, tiny_backbone, tmp_path):
    folder = tmp_path / "run"
    main(
        [
            "fit", "--config", f"svd_{task}.yaml", "--model.backbone", str(tiny_backbone), "--model.density", "0.5",
            "--data.path", str(shared / "data" / "glue" / task), "--data.train_examples", "64",
            "--data.max_length", "24", "--data.eval_batch_size", "500",
            "--model.dense.epochs", "1", "--model.retrain.epochs", "1",
            "--trainer.enable_progress_bar", "false", "--run_dir", str(folder),
        ]
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    record = json.loads((folder / "stages.json").read_text())[-1]
    assert report["task"] == task and -1 <= report["compressed"]["metric"] <= 1
    assert f"val/{report['metric']['name']}" in record["metric"]
    assert report["compressed"]["metric"] == pytest.approx(
        record["metric"][f"val/{report['metric']['name']}"], abs=1e-5
    )
    if task == "mnli":
        assert "val_mismatched/accuracy" in record["metric"]
