"""Running stages: what may change when a run is continued, and with how many threads it works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lit_compress.run.folder import Run
from lit_compress.run.runner import SMALL, check_unchanged, use_threads
from lit_compress.tasks.records import get_task
from lit_compress.utils.errors import UserError
from lit_compress.version import __version__

CONFIG = {"model": {"class_path": "SVD", "init_args": {"density": 0.5}}, "export": {}}


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    made.begin(CONFIG)
    made.finish({"name": "dense", "data": "old", "version": __version__})
    return made


def data(name, split=(8, 1, 1), task="sst2"):
    return SimpleNamespace(fingerprint=lambda split: name, split=list(split), record=get_task(task))


@pytest.mark.parametrize("mark", [{}, {"data": "old", "version": __version__}])
def test_other_data_is_refused(run, mark):
    check_unchanged(run, data("old"), mark)
    with pytest.raises(UserError, match=r"data.path: stage dense of .* had other data; give the same"):
        check_unchanged(run, data("new"), mark)


@pytest.mark.parametrize(("task", "split", "line"), [
    ("sst2", [4, 2, 1], None),
    ("sst2", [4, 1, 2], None),
    ("sst2", [8, 1, 2], r"data.batch_size: the global batch of .* was 8, now 16 \(batch_size, .*give the same product"),
    ("stsb_embedding", [4, 2, 1], r"data.batch_size: the split of .* was \[8, 1, 1\], now \[4, 2, 1\]; vectors"),
])  # fmt: skip
def test_a_step_may_be_divided_otherwise(run, task, split, line):
    mark = {"data": "old", "split": [8, 1, 1], "version": __version__}
    now = data("old", split=split, task=task)
    if line is None:
        return check_unchanged(run, now, mark)
    with pytest.raises(UserError, match=line):
        check_unchanged(run, now, mark)


@pytest.mark.parametrize(
    ("was", "split", "exact"), [(1, [8, 1, 1], True), (1, [4, 2, 1], False), (2, [8, 1, 1], False)]
)
def test_positions_of_0_2_counted_micro_batches(was, split, exact, run):
    mark = {"data": "old", "version": "0.2.0", "stage": "prune"}
    run.begin(CONFIG | {"trainer": {"accumulate_grad_batches": was}})
    if exact:
        return check_unchanged(run, data("old", split=split), mark)
    with pytest.raises(UserError, match=r"counted micro-batches in '.*prune/last.ckpt', which .*; remove it to begin"):
        check_unchanged(run, data("old", split=split), mark)


def test_another_version_goes_on_with_a_note(run, capsys, monkeypatch):
    monkeypatch.setattr("lit_compress.utils.progress._noted", set())
    check_unchanged(run, data("old"), {"data": "old", "version": "0.2.0"})
    assert f"lit_compress 0.2.0 began '{run.folder}', this is {__version__}" in capsys.readouterr().err


def test_a_small_model_has_one_thread_and_a_continued_run_its_own_unless_the_environment_says(monkeypatch):
    pinned = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads(SMALL, recorded=3) == pinned
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    try:
        assert [use_threads(1, recorded=3), use_threads(SMALL), use_threads(SMALL - 1)] == [3, 3, 1]
    finally:
        torch.set_num_threads(pinned)
