"""Curves are read from events and from the files of a CSV logger."""

from __future__ import annotations

from lit_compress.run.curves import MOST, read_curves


def test_events_of_all_stages_are_one_curve(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for stage, start in (("prune", 0), ("retrain", 200)):
        events = SummaryWriter(str(tmp_path / "tensorboard" / stage))
        for step in range(start, start + 200):
            events.add_scalar("train/loss", step / 2, step)
            events.add_scalar("train/threshold", 1.0, step)
        events.close()
    found = read_curves(tmp_path)
    assert set(found) == {"train/loss"} and len(found["train/loss"]) == MOST
    assert found["train/loss"][0] == (0, 0) and found["train/loss"][-1] == (399, 199.5)


def test_columns_of_a_csv_logger(tmp_path):
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    (tmp_path / "logs" / "version_0" / "metrics.csv").write_text(
        "epoch,step,train/loss,val/accuracy\n0,9,,0.5\n0,4,2,\n"
    )
    assert read_curves(tmp_path) == {"train/loss": [(4, 2)], "val/accuracy": [(9, 0.5)]}
    assert read_curves(tmp_path / "none") == {}
