"""The main job on real weights and real data, cut short."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule


def part_of(folder, out, rows):
    """Write the first rows of a task's real files to ``out``; return it."""
    out.mkdir()
    for path in folder.glob("[tv]*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, rows), out / path.name)
    return str(out)


# over 10 s: a real model of 22M parameters
def test_lpaf_on_minilm_and_sst2(shared, tmp_path):
    folder = tmp_path / "run"
    main([
        "fit", "--config", "lpaf_sst2.yaml", "--model.backbone", str(shared / "models" / "minilm-l6-h384"),
        "--data.path", part_of(shared / "data" / "glue" / "sst2", tmp_path / "data", 32),
        "--model.dense.epochs", "1", "--model.dense.learning_rate", "1e-4",
        "--model.prune.epochs", "1", "--model.retrain.epochs", "1", "--trainer.enable_progress_bar", "false",
        "--run_dir", str(folder),
    ])  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert report["dense"]["params"]["sites"] == 10_616_832 and report["dense"]["density"] > 1 - 1e-6  # float16
    assert report["dense"]["bytes"] < 2.01 * report["dense"]["params"]["total"]  # float16, as the model was given
    assert report["stages"]["prune"]["density"] == 0.25
    assert 0.24 < report["compressed"]["density"] <= 0.25
    assert report["ratios"]["flops"] < 0.3 and report["ratios"]["speedup"] > 1.2
    assert report["export_difference"] <= 1e-5


@pytest.mark.parametrize("task", ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"])
def test_every_glue_task_is_read(task, shared, tiny_backbone):
    data = DataModule(task, str(tiny_backbone), str(shared / "data" / "glue" / task), train_examples=64, max_length=24)
    batches = [next(iter(loader)) for loader in (data.train_dataloader(), *data.val_dataloader())]
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels.min() >= 0 and labels.max() <= {"stsb": 5, "mnli": 2}.get(task, 1)
