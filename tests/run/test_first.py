"""The first process of a run decides, the others take it: from the environment, or from the store where they wait."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import HashStore

from lit_compress.run.first import DECIDED, _at_store, of_first
from lit_compress.utils.errors import UserError

ONE = {"accelerator": "cpu", "devices": 1}
TWO = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


def never():
    raise AssertionError("only the first process decides")


def test_one_process_decides_for_itself(monkeypatch):
    monkeypatch.delenv(DECIDED, raising=False)
    assert of_first("run", lambda: 0.25, ONE) == 0.25


def test_processes_that_lightning_starts_inherit(monkeypatch):
    monkeypatch.setenv(DECIDED, "{}")
    assert of_first("run", lambda: {"density": 0.3}, TWO) == {"density": 0.3}
    assert of_first("dense", lambda: None, TWO) is None
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert of_first("run", never, TWO) == {"density": 0.3}
    assert of_first("dense", never, TWO) is None
    with monkeypatch.context() as patch:  # a second run of the same process asks the first one again
        patch.setattr("lit_compress.run.first._store", lambda *_: store)
        patch.setattr("lit_compress.run.first._asked", iter([7]))
        store = HashStore()
        store.set("lit_compress/7/run", json.dumps({"value": 0.5}))
        assert of_first("run", never, TWO) == 0.5


def test_processes_that_are_there_already_wait(monkeypatch):
    store = HashStore()
    assert _at_store(store, "run", lambda: {"density": 0.3}) == {"density": 0.3}
    with pytest.raises(UserError, match="cannot be met"):
        _at_store(store, "other", lambda: fail("the budget cannot be met"))
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert _at_store(store, "run", never) == {"density": 0.3}
    with pytest.raises(UserError, match="the first process has failed: the budget cannot be met"):
        _at_store(store, "other", never)
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(UserError, match="no decision from the first process"):
        _at_store(store, "nothing", never)


def fail(line):
    raise UserError(line)
