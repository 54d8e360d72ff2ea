"""No metric on README.md and docs/ is typed by hand: each stands in a table that is made of the benchmarks' results.

Looked at are numbers with one digit after the point from 30 to 100, as metrics in percent are written; in a section
that links to studies only their tables count.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

sys.path.insert(0, str(ROOT))

from benchmarks import tables

METRIC = r"(?<![\d./=-])\b([3-9]\d\.\d)\b(?![\d.])"


@cache
def of_tables() -> dict[str, set[str]]:
    """Return the numbers of the tables of every study, and of all on one page (``benchmarks``)."""
    found = {}
    for path, text in tables.pages().items():
        findings = path.parent / "findings.md"
        made = text.replace(findings.read_text().strip(), "") if findings.is_file() else text
        found[path.parent.name] = set(re.findall(r"\d+\.\d+", made))
    return found


def sections(page: Path) -> list[str]:
    """Return the prose of every section."""
    prose = "\n".join(text for _, language, text in blocks(page) if language == "prose")
    return re.split(r"^## ", prose, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_of_a_page_stand_in_the_tables(page):
    for section in sections(page):
        studies = [name for name in re.findall(r"benchmarks/(\w+)/", section) if name in of_tables()]
        known = set().union(*(of_tables()[name] for name in studies or of_tables()))
        missing = [number for number in re.findall(METRIC, section) if number not in known]
        title = section.partition("\n")[0]
        assert not missing, f"{page.name}, {title}: no table of {studies or 'any study'} has {', '.join(missing)}"
