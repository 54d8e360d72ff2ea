"""Running stages: what each of several processes writes."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_compress.__main__ import main


def test_a_second_process_writes_nothing_before_training(short_run, tmp_path, monkeypatch):
    """It can be ahead of the first, which checks that the run folder is new."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: 1 / 0)
    args = ["fit", "--model", "SVD", "--model.density", "0.5", *short_run, "--run_dir", str(tmp_path / "run")]
    with pytest.raises(ZeroDivisionError):
        main(args)
    assert not (tmp_path / "run").exists()
