"""A file appears whole, or not at all; of anybody's records only so much is read as a real one has."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from lit_compress.__main__ import _told_by_main
from lit_compress.utils import files
from lit_compress.utils.errors import UserError


def test_interrupted_write_leaves_what_was_there(tmp_path):
    folder, rows = tmp_path / "out", tmp_path / "rows"
    for text, raised in {"first": nullcontext(), "sec": pytest.raises(OSError, match="full")}.items():
        with raised, files.atomic_folder(folder) as temporary, files.atomic_file(rows) as file:
            file.write_text(text)
            (temporary / text).write_text(text)
            if text == "sec":
                raise OSError("full")
        assert rows.read_text() == "first" and [path.name for path in folder.iterdir()] == ["first"]
        assert {path.name for path in tmp_path.iterdir()} == {"out", "rows"}


def test_two_processes_that_write_a_folder_do_not_mix_files(tmp_path, monkeypatch):
    (tmp_path / ".out.9.tmp" / "left").mkdir(parents=True)
    with files.atomic_folder(out := tmp_path / "out") as one:
        (one / "a").touch()
        monkeypatch.setattr("os.getpid", lambda: 1)
        with files.atomic_folder(out) as other:
            (other / "b").touch()
        (one / "c").touch()
    assert {path.name for path in (*out.iterdir(), *tmp_path.iterdir())} == {"a", "c", "out"}


@pytest.mark.parametrize("place", ["link", "dangling", "mount", "."])
def test_links_mounts_and_the_working_folder_stay(place, tmp_path, monkeypatch):
    (folder := tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("new" if place == "dangling" else folder)
    monkeypatch.chdir(folder if place == "." else tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: place == "mount")
    out, before = Path(place if place == "." else "link"), folder.stat().st_ino
    for name in "ab":
        with files.atomic_folder(out) as temporary:
            (temporary / name).write_text(name)
    assert [path.name for path in out.iterdir()] == ["b"] and (tmp_path / "link").is_symlink()
    assert place == "link" or folder.stat().st_ino == before


@pytest.mark.parametrize("to", ["/dev/null", "file"])
def test_a_device_is_written_and_a_link_followed(to, tmp_path):
    (link := tmp_path / "link").symlink_to(to)
    files.write_text(link, "text")
    assert link.is_symlink() and link.read_text() == ("text" if to == "file" else "")


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


def test_yaml_with_aliases_is_read(tmp_path):
    text = "row: &row {a: 1}\nother: {<<: *row, b: 2}\nsame: [*row, *row]"
    (path := tmp_path / "a.yaml").write_text(text)
    assert files.read_yaml("config", path) == {"row": {"a": 1}, "other": {"a": 1, "b": 2}, "same": [{"a": 1}, {"a": 1}]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_card_has_fields(tmp_path, end):
    lines = ["---", "license: mit", "---", "# A card", "---", "b: c"]
    (path := tmp_path / "README.md").write_bytes(end.join(lines).encode())
    assert files.card_fields(path) == {"license": "mit"}
    path.write_text("# No fields\n---\na: b\n---\n")
    assert files.card_fields(path) == {}
    path.write_text("---\na: [\n---\n# A card\n")
    with pytest.raises(ValueError):
        files.card_fields(path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "here").write_text("")
    files.check_folder("out", tmp_path / "new" / "folder")
    files.check_folder("--output", tmp_path / "here", file=True)
    for path, file, words in (
        (tmp_path / "here", False, "is a file; give a new or empty folder"),
        (tmp_path, True, "is a folder; give a file"),
        (tmp_path / "here" / "a", False, "is a file; nothing can be written under it"),
        (tmp_path / ("a" * 300), False, "File name too long"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            files.check_folder("out", path, file)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "a: [", "a: b: c", "? [a]\n: b", "*a", "a: \0"])
def test_a_broken_record_is_one_line(text, tmp_path):
    (path := tmp_path / "report").write_text(text)
    for read in (partial(files.read_json, kind=list), files.read_yaml)[: 1 if len(text) > 99 else 2]:
        with pytest.raises(UserError, match=r"^run_dir: '.*report' is not readable (JSON|YAML)"):
            read("run_dir", path)
