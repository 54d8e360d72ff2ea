"""The report says on which machine a model was measured."""

from __future__ import annotations

import os

from lit_compress.export.report import hardware


def test_memory_has_one_decimal(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": int(1.26 * 2**18)}.get)
    assert hardware()["memory_gib"] == 1.3
