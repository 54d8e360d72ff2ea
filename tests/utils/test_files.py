"""A file appears whole, or not at all."""

from __future__ import annotations

import threading

import pytest

from lit_compress.__main__ import _told_by_main
from lit_compress.utils.files import atomic_file, write_text


def test_what_failed_leaves_nothing_and_the_file_stays(tmp_path):
    write_text(tmp_path / "rows", "first")
    with pytest.raises(OSError, match="full"), atomic_file(tmp_path / "rows") as temporary:
        temporary.write_text("sec")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"] and (tmp_path / "rows").read_text() == "first"


def test_what_a_killed_process_left_of_the_file_goes(tmp_path):
    left, other = tmp_path / ".rows.4194999.tmp", tmp_path / ".columns.4194999.tmp"  # beyond the largest number
    for path in (left, other):
        path.write_text("hal")
    write_text(tmp_path / "rows", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "rows"]


def test_a_thread_that_cannot_write_prints_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", _told_by_main)

    def fail(error):
        raise error

    for error in (OSError(28, "No space left on device"), ValueError("a bug")):
        thread = threading.Thread(target=fail, args=(error,))
        thread.start()
        thread.join()
        said = capsys.readouterr().err
        assert ("Traceback" in said) == isinstance(error, ValueError)
