"""A file appears whole, or not at all."""

from __future__ import annotations

import threading

import pytest
import yaml
from jsonargparse._loaders_dumpers import yaml_load

from lit_compress.__main__ import _told_by_main
from lit_compress.utils.files import atomic_file, write_text, yaml_text


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


def test_names_like_numbers_stay_text_for_every_reader():
    names = ["1e5", "1e-4", "1.e5", "+1e5", ".5", "0x10", "0o7", "1_000", "2026-01-01", "12:30", "null", "~", "on",
             "no", "", "-", "a: b", "#x", "[a]", "it's", "1.0", "-1", ".inf", "caf\u00e9", "123e45"]  # fmt: skip
    content = {"names": names, **{name: name for name in names}, "number": 3, "rate": 2e-5, "none": None, "true": True}
    for unicode in (False, True):
        text = yaml_text(content, unicode)
        assert yaml.safe_load(text) == yaml_load(text) == content
