"""No metric on README.md and docs/ is typed by hand: each stands in a table that is made of the benchmarks' results.

Looked at are numbers with one digit after the point from 30 to 100, as metrics in percent are written, but not what a
sentence that begins with "The paper" says. In a section that links to studies only their tables count. Where methods
are named, only their rows and columns do: those of the section's heading, of the sentence, and of the one before. So a
wrong number is not seen where another cell of these methods has it, as when two of one method changed places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import PAGES, ROOT, blocks

METRIC = r"(?<![\d./=-])\b([3-9]\d\.\d)\b(?![\d.])"
METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
NO_METHOD = ("dense", "Dense", "teacher")
OTHER_NAMES = {  # of methods, in tables
    "Second-order compression": ["SecondOrder", "K-FAC", "factorized"],
    "CoFi with LoSparse": ["CoFi x LoSparse"],
    "Low-rank I and II": ["Low-rank I", "Low-rank II"],
}


class Place(NamedTuple):
    """A number of a generated page: its study, and what its row and column, or its line of text, say of it."""

    study: str
    number: str
    text: str


@cache
def names() -> dict[str, list[str]]:
    """Return the names of every method on the page of methods, by its heading."""
    headings = re.findall(r"^## (.+)$", METHODS, flags=re.M)[2:]
    return {heading: [heading, *OTHER_NAMES.get(heading, [])] for heading in headings}


def named(text: str) -> set[str]:
    """Return the methods that a text names."""
    found = {heading: rf"(?<![\w-])({'|'.join(map(re.escape, own))})(?![\w-])" for heading, own in names().items()}
    return {heading for heading, pattern in found.items() if re.search(pattern, text, flags=re.I)}


@cache
def places() -> list[tuple[Place, set[str]]]:
    """Return the numbers of all generated pages with the methods they are of; findings, which are typed, do not count.

    That the pages are those of the results is tested in tests/test_benchmarks.py.
    """
    found = []
    for path in [*(ROOT / "benchmarks").rglob("README.md"), ROOT / "docs" / "scaling.md"]:
        text, findings = path.read_text(), path.parent / "findings.md"
        made = text.replace(findings.read_text().strip(), "") if findings.is_file() else text
        for number, around, heading in numbers(made):
            found.append((Place(path.parent.name, number, around), named(around) or named(heading)))
    return found


def numbers(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield every number of a page with its row and the head of its column, or its paragraph, and the heading above."""
    heading, columns = "", []
    for line in re.sub(r"(?<=[^\n|])\n(?=[^\n|#])", " ", page).splitlines():
        heading = line if line.startswith("#") else heading
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        columns = columns or cells if cells else []
        for column, cell in zip(columns, cells, strict=True) if cells else [("", line)]:
            for number in re.findall(r"\d+\.\d+", cell):
                yield number, f"{line} {column}", heading


def sections(page: Path) -> list[str]:
    """Return the prose of every section."""
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    return re.split(r"^## ", prose, flags=re.M)


def not_in_tables(section: str) -> list[str]:
    """Return the metrics of a section that no table has for the methods in question."""
    studies = {name for name in re.findall(r"benchmarks/(\w+)/", section) if (ROOT / "benchmarks" / name).is_dir()}
    near = [found for found in places() if not studies or found[0].study in studies]
    heading, _, body = section.partition("\n")
    missing, before = [], ""
    for sentence in re.split(r"(?<=[.;])\s+", body):
        metrics = [] if sentence.startswith("The paper") else re.findall(METRIC, sentence)
        methods = named(f"{before} {sentence}") | (named(heading) if heading in names() else set())
        known = {
            place.number for place, own in near
            if not methods or methods & own or any(word in place.text for word in NO_METHOD)
        } if metrics else set()  # fmt: skip
        missing += [number for number in metrics if number not in known]
        before = sentence
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_of_a_page_stand_in_the_tables(page):
    for section in sections(page):
        missing = not_in_tables(section)
        assert not missing, f"{page.name}, {section.partition(chr(10))[0]}: no table of these methods has {missing}"


@pytest.mark.parametrize(
    ("method", "own", "other"),
    [("Magnitude", "80.2", "83.7"), ("FLOP", "84.3", "85.9"), ("LoSparse", "84.3", "85.9"), ("SVD", "84.5", "85.2")],
)
def test_a_number_of_another_method_is_seen(method, own, other):
    """``other`` stands in tables, too, in the rows of another method."""
    (section,) = [text for text in sections(ROOT / "docs" / "methods.md") if text.startswith(f"{method}\n")]
    assert own in section and any(place.number == other for place, _ in places())
    assert not_in_tables(section) == []
    assert set(not_in_tables(section.replace(own, other))) == {other}
