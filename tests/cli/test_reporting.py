"""report and list on a finished run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mistakes import fails

from lit_compress.__main__ import main
from lit_compress.utils.manifest import difference


def said(capsys, *words):
    capsys.readouterr()
    main([str(word) for word in words])
    return capsys.readouterr().out


def test_what_there_is(run, capsys):
    listed = said(capsys, "list", run.parent)
    metric = json.loads((run / "report.json").read_text())["compressed"]["metric"]
    (line,) = [x.split() for x in listed.splitlines() if x.split()[1:2] == [run.name]]
    assert "done" in line and f"{metric:.4g}" in line


def test_mistakes(capsys, tmp_path):
    assert "has no run (report.json)" in fails(capsys, "list", tmp_path)
    assert "list: no folder 'methods'" in fails(capsys, "list", "methods")
    assert "json: this option was removed in version 0.3; see" in fails(capsys, "list", tmp_path, "--json")
    assert "no folder" in fails(capsys, "report", tmp_path / "none")


def test_the_page_of_a_run(run, capsys, tmp_path):
    assert json.loads((run / "stages.json").read_text())[0]["peak_mib"] > 1
    text = said(capsys, "report", run, "--out", tmp_path / "page")
    assert text == f"page: {tmp_path / 'page' / 'index.html'}\n"
    page = (tmp_path / "page" / "index.html").read_text()
    assert "Ship this folder" in page


def test_a_run_lists_all_it_wrote(run, tmp_path, capsys):
    """Every model and the records; a damaged record, and a damaged model, is a line of every command that reads it."""
    for folder in (run, run / "dense" / "net", run / "retrain" / "net", run / "export"):
        listed = set(json.loads((folder / "manifest.json").read_text())["files"])
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        own = {name for name in files if folder != run or ("/" not in name and not name.startswith("."))}
        assert listed | {"manifest.json"} == own - {"README.md"} and difference(folder) is None
    assert json.loads((run / "report.json").read_text())["manifest"] is True
    other = shutil.copytree(run, tmp_path / "other")
    out = tmp_path / "out"
    for file, commands in {
        "config.yaml": (["validate", other], ["export", other, out]),
        "stages.json": (["export", other, out], ["report", other], ["list", other]),
        "report.json": (["report", other], ["list", other]),
        "export/report.json": (["validate", other / "export"], ["report", other / "export"]),
        "export/model.safetensors": (["predict", other], ["bench", other], ["export", other / "export", out]),
        "dense/net/model.safetensors": (["export", other, out], ["validate", other / "dense/net"]),
        "retrain/net/tokenizer.json": (["export", other, out],),
    }.items():
        good = (other / file).read_bytes()
        (other / file).write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
        for words in commands:
            line = fails(capsys, *words)
            assert Path(file).name in line and ("another SHA-256" in line or "not readable JSON" in line), words
        (other / file).write_bytes(good)
    assert not out.exists() and difference(other) is None
