"""The report says on which machine a model was measured."""

from __future__ import annotations

import os

import torch
from tiny import make_net

from lit_compress.export.report import add_latency, hardware
from lit_compress.tasks.records import TASKS


def test_memory_has_one_decimal(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": int(1.26 * 2**18)}.get)
    assert hardware()["memory_gib"] == 1.3


def test_models_without_values_have_no_times():
    with torch.device("meta"):
        net = make_net("bert", "sst2")
    entries = [{}, {}]
    found = add_latency(entries, [net, net], TASKS["sst2"])
    assert found == {"rounds": 0, "spread": None, "steady": False, "speedup": None}
    assert [entry["latency_ms"]["median"] for entry in entries] == [None, None]
