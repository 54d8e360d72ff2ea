"""What processes of a run wait for: the density of the first one, or its failure."""

import copy
import threading

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from test_folder import CONFIG

from lit_compress.run import settle
from lit_compress.run.folder import Run
from lit_compress.run.settle import change_of_first, config_of_first, density_of_first, failure_told
from lit_compress.utils.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    return Run(tmp_path / "runs" / "mine")


def test_the_density_of_the_first_process(run):
    run.begin({}, budget={"asked": "speedup=3x", "density": 0.3})
    assert density_of_first(run, "speedup=3x") == 0.3


def test_the_density_of_a_start_that_was_killed_before_the_run_began_is_not_taken(run):
    """Milliseconds differ from start to start, and shapes must not differ between processes."""
    run.begin({}, budget={"asked": "speedup=3x", "density": 0.3})
    with failure_told(run):
        assert run.density("speedup=3x") is None
    run.begin({}, budget={"asked": "speedup=3x", "density": 0.4})
    run.finish({"name": "dense"})
    with failure_told(run):
        assert run.density("speedup=3x") == 0.4


def test_a_failure_of_the_first_process_ends_the_others(run, monkeypatch):
    with pytest.raises(UserError, match="cannot be met"), failure_told(run):
        raise UserError("the budget cannot be met")
    monkeypatch.setattr(settle, "STALE", 0.1)
    with pytest.raises(UserError, match="the first process has failed: the budget cannot be met"):
        density_of_first(run, "speedup=9x")
    assert not run.folder.exists()
    with failure_told(run):  # the next start
        pass
    monkeypatch.setattr(settle, "MOST", 0.3)
    with pytest.raises(UserError, match=r"'speedup=9x' has no density from the first process after 0 minutes"):
        density_of_first(run, "speedup=9x")


def test_the_config_of_the_first_process_is_waited_for(run):
    config = {"model": {"class_path": "lit_compress.methods.SVD", "init_args": {"backbone": "me/net"}}}
    writer = threading.Timer(0.3, run.begin, [config])
    writer.start()
    assert config_of_first(run)["model"]["init_args"]["backbone"] == "me/net"
    writer.join()


def test_a_changed_config_of_the_first_process_is_waited_for(run):
    """Else a process could read the checkpoint that the first one drops."""
    new = copy.deepcopy(CONFIG)
    new["model"]["init_args"]["density"] = 0.5
    run.begin(CONFIG)
    run.stage("dense").mkdir()
    (run.stage("dense") / "last.ckpt").touch()

    def change():
        run.drop_checkpoints("dense")
        run.change(new, [], "dense")

    writer = threading.Timer(0.3, change)
    writer.start()
    change_of_first(run, new)
    assert not (run.stage("dense") / "last.ckpt").exists()
    writer.join()


def test_one_process_leaves_no_file(run, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError), failure_told(run):
        raise UserError("no")
    assert not run.folder.parent.exists()
