"""Loggers that the user chose: one axis of steps, also after a stop; figures, settings and the final table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from mistakes import fit

from lit_compress.__main__ import main
from lit_compress.run.callbacks import Checkpoints


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def arguments(short_run):
    return [*fit(short_run, "")[:-2], "--model.dense.epochs", "1", "--model.retrain.epochs", "1", "--trainer.logger",
            "CSVLogger", "--trainer.log_every_n_steps", "2", "--checkpoint_every", "4"]  # fmt: skip


def test_a_csv_logger_has_one_file_with_all_stages_also_after_a_stop(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lit_compress.export.folder.check_export", lambda net, path: 0.0)

    def run(name, *more):
        logs = ["--trainer.logger.save_dir", str(tmp_path / f"{name}-logs")]
        main([*arguments, "--run_dir", str(tmp_path / name), *logs, *more])

    run("whole")
    assert f"curves: CSVLogger in {tmp_path / 'whole-logs'}" in capsys.readouterr().out
    found = rows(tmp_path / "whole-logs")
    steps = [int(row["step"]) for row in found]
    assert steps == sorted(steps) and max(steps) == 26 and {row["step"] for row in found if row["train/loss"]} >= {
        "1", "3", "14", "16"
    }  # fmt: skip
    (folder,) = (tmp_path / "whole-logs").glob("*/*")
    assert {"dense-structure.png", "retrain-structure.png", "report.md", "hparams.yaml"} <= {
        path.name for path in folder.iterdir()
    }
    assert "site density" in (folder / "report.md").read_text() and found[-1]["result/accuracy"]

    end = Checkpoints.on_train_batch_end

    def stop(self, trainer, module, *_):
        end(self, trainer, module, *_)
        if self.folder.name == "retrain" and trainer.global_step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", stop)
    with pytest.raises(SystemExit):
        run("stopped")
    monkeypatch.setattr(Checkpoints, "on_train_batch_end", end)
    run("stopped", "--ckpt_path", "last")
    timeless = [name for name in found[0] if name != "result/speedup"]
    again = rows(tmp_path / "stopped-logs")
    assert [[row[name] for name in timeless] for row in again] == [[row[name] for name in timeless] for row in found]
