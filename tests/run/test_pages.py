"""The page of runs: fast with many of them, nothing from outside, no text of a file as HTML, the same again."""

from __future__ import annotations

import base64
import copy
import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from lit_compress.run import pages
from lit_compress.run.results import read_results
from lit_compress.utils.errors import UserError

OLD = Path(__file__).parents[1] / "old_runs" / "lpaf"
BUDGETS = ("density=0.5", "density=0.25", "density=0.1", "density=0.06")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Reader(HTMLParser):
    """Checks that tags are nested, and collects what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def read(page: Path) -> Reader:
    """Read a page that must be valid, alone, and whose links lead somewhere."""
    html, found = page.read_text(encoding="utf-8"), Reader()
    found.feed(html)
    assert not found.open
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [str(attrs["href"]) for tag, attrs in found.tags if tag == "a"]
    assert all(link[1:] in ids for link in links if link.startswith("#"))
    assert all((page.parent / unquote(link)).exists() for link in links if not link.startswith("#"))
    pictures = [str(attrs["src"]) for tag, attrs in found.tags if tag == "img"]
    assert all(re.fullmatch(r"data:image/svg\+xml;base64,[\w+/=]+", picture) for picture in pictures)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe", "object", "embed"}
    for picture in pictures:
        html = html.replace(picture, "")
    assert not re.search(r"(?:https?:)?//\w", html), "something from outside"
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)
    return found


def report(metric: float, density: float) -> dict:
    """A report of an earlier version with other numbers."""
    made = copy.deepcopy(json.loads((OLD / "report.json").read_text()))
    entry = made["compressed"]
    entry |= {"metric": metric, "density": density, "flops": int(1e9 * density), "bytes": int(4e8 * density) + 10**7}
    entry["params"]["non_embedding"] = int(1e8 * density)
    made["stages"]["compressed"] = entry
    return made


def comparison(folder: Path, labels: int, seeds: int, **more) -> Path:
    """Write a comparison of finished runs."""
    cells = []
    for label in range(labels):
        for place, budget in enumerate(BUDGETS):
            for seed in range(seeds):
                run = folder / "runs" / f"{label}-{place}-{seed}"
                run.mkdir(parents=True)
                made = report(0.9 - 0.02 * place - 0.003 * label + 0.001 * seed, float(budget[8:]))
                (run / "report.json").write_text(json.dumps(made))
                (run / "stages.json").write_text(json.dumps([{"name": "retrain", "steps": 1200, "seconds": 90.0}]))
                cells.append({"name": run.name, "method": "LPAF", "label": f"method {label}", "budget": budget,
                              "seed": seed, "learning_rate": 3e-4, "status": "done", "error": None,
                              "run": f"runs/{run.name}"})  # fmt: skip
    made = {"format": 1, "config": {"task": "sst2"}, "cells": cells,
            "fairness": "Every method makes 1,200 updates."}  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(made | more))
    return folder


@pytest.fixture
def no_pictures(monkeypatch):
    """They take seconds to draw."""
    monkeypatch.setattr(pages, "as_svg", lambda figure: "<svg/>")


@pytest.fixture
def hostile(tmp_path):
    """A comparison whose every text is hostile, with runs that failed, are missing or go on."""
    folder = comparison(tmp_path / "a b", 1, 2, fairness=HOSTILE)
    found = json.loads((folder / "compare.json").read_text())
    found["cells"][0] |= {"label": HOSTILE, "learning_rate": HOSTILE}
    for number, status in ((1, "failed"), (2, "missing"), (3, "unfinished")):
        found["cells"][number] |= {"status": status, "run": None, "error": HOSTILE if number == 1 else None}
    (folder / "compare.json").write_text(json.dumps(found))
    return folder


def test_texts_of_files_stay_texts(hostile, no_pictures):
    page = pages.write(hostile, hostile / "out")
    found = read(page)
    assert HOSTILE in found.text
    assert all(word in found.text for word in ("1 failed", "1 missing", "1 unfinished", "5 done"))
    steps = [row["steps"] for row in csv.DictReader((page.parent / "results.csv").open())]
    assert set(steps) == {"", "1200"}


def test_noisy_times_are_no_numbers_and_other_densities_are_told(tmp_path, no_pictures):
    """Two models of one size, timed as 2.15x and 4.88x by runs that say "too noisy", one of them not as asked."""
    folder = comparison(tmp_path / "c", 2, 1)
    for label, times in ((0, 2.15), (1, 4.88)):
        path = folder / "runs" / f"{label}-0-0" / "report.json"
        made = json.loads(path.read_text())
        made["ratios"]["speedup"] = times
        gain = {"median": times, "low": times / 2, "high": times, "verdict": "unsteady"}
        made["timing"] = {"steady": False, "spread": 2.0, "speedup": gain}
        made["compressed"]["density"] = (0.4, 0.4999)[label]
        path.write_text(json.dumps(made))
    page = pages.write(folder)
    text = read(page).text
    assert (
        "≈2.1x" in text
        and "≈4.9x" in text
        and "2.15x" not in text.split("Runs")[0]
        and "too noisy for a second" in text
    )
    assert "0.90000.4000" in text and "density=0.5" in text
    rows = [*csv.DictReader((page.parent / "results.csv").open())]
    assert sum(row["speedup_verdict"] == "unsteady" for row in rows) == 2


def pictures(page: Path) -> list[str]:
    """Return the pictures of a page as SVG."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page.read_text())
    return [base64.b64decode(text).decode() for text in found]


def test_a_run_has_the_steps_of_its_stages(tmp_path):
    folder = comparison(tmp_path / "c", 1, 1)
    run = folder / "runs" / "0-0-0"
    stages = [{"name": "dense", "steps": 600}, {"name": "retrain", "steps": 600, "seconds": 90.0}]
    (run / "stages.json").write_text(json.dumps(stages))
    (run / "config.yaml").write_text("seed_everything: 7")
    page = pages.write(run)
    assert not pictures(page) and "/stages.json" not in read(page).text
    (row,) = csv.DictReader((page.parent / "results.csv").open())
    assert (row["steps"], row["seconds"]) == ("1200", "90.0")


@pytest.mark.slow
def test_all_methods_with_the_best_result_are_bold_and_chance_is_told(tmp_path):
    folder = comparison(tmp_path / "c", 3, 1)
    for label, metric in enumerate((0.9, 0.9, 0.55)):
        made = report(metric, 0.5) | {"constant": 0.5, "constant_error": 0.03}
        (folder / "runs" / f"{label}-0-0" / "report.json").write_text(json.dumps(made))
    page = pages.write(folder)
    cells = re.findall(r'<td( class="best")?>([^<]+)</td>', page.read_text())
    assert cells.count((' class="best"', "0.9000")) == 2
    assert ("", "0.5500, at chance") in cells and "the compressed model is at chance" in read(page).text
    assert all(f">method {label}</text>" in pictures(page)[0] for label in range(3))


def test_one_run_of_an_earlier_version(tmp_path):
    """A second page is the same and takes its place."""
    run = Path(shutil.copytree(OLD, tmp_path / "lpaf"))
    page = pages.write(run)
    assert "Ship this folder: ../export/" in read(page).text
    before = page.read_bytes()
    assert pages.write(run).read_bytes() == before


def test_runs_of_a_folder_are_told_apart(tmp_path, no_pictures):
    """By their names; a run that is not finished is shown, what is none is not."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report(0.8, 0.25)))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text("model: {class_path: x.SVD, init_args: {density: 0.1}}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    page = pages.write(tmp_path)
    runs = [*csv.DictReader((page.parent / "results.csv").open())]
    assert [(run["label"], run["status"]) for run in runs] == [("a", "done"), ("b", "done"), ("c", "unfinished")]


def test_runs_on_other_rows_are_in_other_tables(tmp_path, no_pictures):
    """Also on two files of the user's own with one metric, and on fewer rows of the same."""
    for number, (path, rows) in enumerate(
        [("x/a.csv", 90), ("b.csv", 90), ("a.csv", 90), ("a.csv", 50), ("a.csv", 50)]
    ):
        made = report(0.8, 0.25) | {"task": "custom", "config": {"data": {"path": path}}}
        made["metric"] |= {"rows": rows}
        made["data"] = {"dev": ["a hash"]} if number == 4 else {}
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "report.json").write_text(json.dumps(made))
    page = read(pages.write(tmp_path)).text
    found = re.findall(r"Results on (\S+)\nDev accuracy of (\d+)", page)
    assert found == [("a.csv", "90"), ("b.csv", "90"), ("a.csv", "50"), ("a.csv", "50")]


@pytest.mark.parametrize("config", ["model: resnet50", "- a", "text", "model: {class_path: x.SVD, init_args: [1]}"])
@pytest.mark.parametrize("stages", ['{"a": 1}', "[1]"])
def test_a_config_of_another_program_is_an_unfinished_run(config, stages, tmp_path):
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "stages.json").write_text(stages)
    [run], _ = read_results(tmp_path)
    assert (run.status, run.steps) == ("unfinished", None) and pages.record(run)["metric"] is None


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"has no run \(report.json\)"):
        pages.write(tmp_path)
    for name in ("mine.txt", "index.html", "results.csv"):
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match="holds something that is not a report"):
            pages.write(OLD, tmp_path)
    (tmp_path / "results.csv").write_text("name,label,method\n")
    pages.write(OLD, tmp_path)
    assert (tmp_path / "mine.txt").is_file() and (tmp_path / "index.html").read_text()
