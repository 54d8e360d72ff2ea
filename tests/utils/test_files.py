"""A file appears whole, or not at all; of anybody's records only so much is read as a real one has."""

from __future__ import annotations

import threading

import pytest
import yaml
from jsonargparse._loaders_dumpers import yaml_load

from lit_compress.__main__ import _told_by_main
from lit_compress.utils.errors import UserError
from lit_compress.utils.files import (
    atomic_file,
    atomic_folder,
    card_fields,
    check_folder,
    read_json,
    read_yaml,
    write_text,
    yaml_text,
)


def test_what_failed_leaves_nothing_and_the_file_stays(tmp_path):
    write_text(tmp_path / "rows", "first")
    with pytest.raises(OSError, match="full"), atomic_file(tmp_path / "rows") as temporary:
        temporary.write_text("sec")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"] and (tmp_path / "rows").read_text() == "first"


def test_interrupted_write_leaves_what_was_there(tmp_path):
    folder = tmp_path / "out"
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text("first")
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "a").write_text("second")
        raise RuntimeError
    assert (folder / "a").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with atomic_folder(folder) as temporary:
        (temporary / "b").write_text("third")
    assert [p.name for p in folder.iterdir()] == ["b"]


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
    text = yaml_text(content)
    assert yaml.safe_load(text) == yaml_load(text) == content


def test_yaml_with_aliases_is_read(tmp_path):
    text = "row: &row {a: 1}\nother: {<<: *row, b: 2}\nsame: [*row, *row]"
    (path := tmp_path / "a.yaml").write_text(text)
    assert read_yaml("config", path) == {"row": {"a": 1}, "other": {"a": 1, "b": 2}, "same": [{"a": 1}, {"a": 1}]}


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "? [a]\n: b", "*a", "a: \0"])
def test_broken_yaml_is_one_line(text, tmp_path):
    (path := tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^config: '.*a.yaml' is not readable YAML"):
        read_yaml("config", path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_card_has_fields(tmp_path, end):
    path = tmp_path / "README.md"
    path.write_bytes(end.join(["---", "license: mit", "---", "# A card", "---", "b: c"]).encode())
    assert card_fields(path) == {"license": "mit"}
    path.write_text("# No fields\n---\na: b\n---\n")
    assert card_fields(path) == {}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "here").write_text("")
    check_folder("out", tmp_path / "new" / "folder")
    check_folder("--output", tmp_path / "here", file=True)
    for path, file, words in (
        (tmp_path / "here", False, "is a file; give a new or empty folder"),
        (tmp_path, True, "is a folder; give a file"),
        (tmp_path / "here" / "a", False, "is a file; nothing can be written under it"),
        (tmp_path / ("a" * 300), False, "File name too long"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            check_folder("out", path, file)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "a: ["])
def test_a_broken_record_is_one_line(text, tmp_path):
    (path := tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=r"^run_dir: '.*report.json' is not readable JSON"):
        read_json("run_dir", path, list)
    path.write_text(f"---\n{text}\n---\n# A card\n")
    with pytest.raises(ValueError):
        card_fields(path)
