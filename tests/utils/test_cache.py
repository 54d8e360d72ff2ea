"""An entry of the cache is written once, and made again when it is no longer what was written."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_compress.utils.cache import build_once
from lit_compress.utils.errors import UserError


class Fill:
    """Write the same two files every time, and count."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "rows.bin").write_bytes(random.Random(0).randbytes(5000))
        (folder / "inner").mkdir()
        (folder / "inner" / "facts.json").write_text('{"rows": 7}')


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def entry(tmp_path):
    fill = Fill()
    return build_once(tmp_path / "cache" / "entry", fill), fill


def test_it_is_written_once(entry):
    folder, fill = entry
    (folder / "more").write_text("datasets puts files of its own beside them")
    assert build_once(folder, fill) == folder and fill.calls == 1
    assert {path.name for path in folder.parent.iterdir()} == {"entry", ".locks"}


@pytest.mark.parametrize("damage", ["a file", "a folder"])
def test_a_broken_entry_is_made_again(entry, damage, capsys):
    folder, fill = entry
    good = content(folder)
    if damage == "a folder":
        shutil.rmtree(folder / "inner")
    else:
        (folder / "rows.bin").write_bytes(bytes(5000))
    assert build_once(folder, fill) == folder
    assert content(folder) == good and fill.calls == 2
    assert "is broken; it is made again" in capsys.readouterr().err


def test_an_entry_of_an_earlier_version_is_made_again_silently(entry, capsys):
    folder, fill = entry
    (folder / "manifest.json").unlink()
    build_once(folder, fill)
    assert fill.calls == 2 and not capsys.readouterr().err


def test_of_two_builders_the_second_waits_for_the_first(tmp_path):
    fill, begun = Fill(), threading.Barrier(2)

    def build():
        begun.wait()
        return build_once(tmp_path / "made", fill)

    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(build), pool.submit(build)]] == [tmp_path / "made"] * 2
    assert fill.calls == 1 and {entry.name for entry in tmp_path.iterdir()} == {"made", ".locks"}


def test_a_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        build_once(tmp_path / "made", lambda _: (_ for _ in ()).throw(RuntimeError))
    assert [entry.name for entry in tmp_path.iterdir()] == [".locks"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^LIT_COMPRESS_CACHE: cannot write to"):
        build_once(tmp_path / "file" / "made", lambda _: None)
