"""The report says on which machine and by which version a model was measured."""

from __future__ import annotations

import os

import pytest

from lit_compress.export import report as module
from lit_compress.export.report import hardware, is_of_this_version
from lit_compress.version import __version__


@pytest.mark.parametrize(
    ("written", "here", "same"), [("a", "a", True), ("a", "b", False), (None, "b", True), ("a", None, True)]
)
def test_a_report_is_of_this_version_by_release_and_commit(written, here, same, monkeypatch):
    monkeypatch.setattr(module, "commit", lambda: here)
    assert is_of_this_version({"versions": {"lit_compress": __version__}, "commit": written}) is same
    assert not is_of_this_version({"versions": {"lit_compress": "0.0"}, "commit": written})


def test_memory_has_one_decimal(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": int(1.26 * 2**18)}.get)
    assert hardware()["memory_gib"] == 1.3
